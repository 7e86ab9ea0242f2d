"""What the autoscaler of a deployment chose, and what from. Knows neither Serve nor how it chooses."""

from monitoring.accumulator import Accumulator, Snapshot


class ScalerMetrics:
    """Series of the deployment of this name."""

    def __init__(self, deployment: str) -> None:
        self._accumulator = Accumulator({"deployment": deployment})

    def set_workers(self, *, wanted: int, asked: int, running: int, reported: int, fewest: int, most: int) -> None:
        """`wanted` now, before bounds and delays; `asked`: what Serve has been told to have. `reported`: workers whose
        work the choice is made of."""
        numbers = {
            "wanted": wanted,
            "asked": asked,
            "running": running,
            "reported": reported,
            "fewest": fewest,
            "most": most,
        }
        for kind, number in numbers.items():
            self._accumulator.set("stallfree_scaling_workers", number, kind)

    def set_demand(self, *, tokens: float, sequences: float) -> None:
        """In workers, in thousandths."""
        self._accumulator.set("stallfree_scaling_seen_demand", round(tokens, 3), "tokens")
        self._accumulator.set("stallfree_scaling_seen_demand", round(sequences, 3), "sequences")

    def snapshot(self) -> Snapshot:
        return self._accumulator.snapshot()
