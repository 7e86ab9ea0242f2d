"""Mixes of settings in which every pair of values occurs, and the engine's options for one mix."""

from dataclasses import dataclass
from itertools import combinations, product

from worker.config import EngineConfig

POOLS = ("ample", "recompute", "swap", "auto")
ORDERS = ("fcfs", "priority", "fair")


@dataclass(frozen=True, slots=True)
class Mix:
    """`pool`: ample, or tiny with this preemption mode; `auto` has a host pool as tiny as itself."""

    budget: int
    alignment: int
    cache: bool
    pool: str
    order: str

    def __str__(self) -> str:
        cache = "on" if self.cache else "off"
        return f"budget {self.budget}, alignment {self.alignment}, cache {cache}, {self.pool}, {self.order}"

    def engine_config(
        self, model: str, *, block_size: int, ample_blocks: int, tiny_blocks: int, max_model_len: int
    ) -> EngineConfig:
        num_host_blocks = {"ample": None, "recompute": None, "swap": ample_blocks, "auto": tiny_blocks // 2}
        return EngineConfig(
            model=model,
            dtype="float32",
            device="cpu",
            max_model_len=max_model_len,
            max_num_batched_tokens=self.budget,
            max_num_seqs=min(self.budget, 64),
            block_size=block_size,
            chunk_alignment=self.alignment,
            enable_prefix_caching=self.cache,
            queue_policy=self.order,
            tenant_weights={"a": 1.0, "b": 3.0},
            num_device_blocks=ample_blocks if self.pool == "ample" else tiny_blocks,
            num_host_blocks=num_host_blocks[self.pool],
            preemption_mode="auto" if self.pool == "ample" else self.pool,
        )


def pairwise_mixes(budgets: tuple[int, ...], alignments: tuple[int, ...]) -> list[Mix]:
    """Greedily the mix with the most pairs that none before it has, until all pairs are there."""
    mixes = [Mix(*values) for values in product(budgets, alignments, (True, False), POOLS, ORDERS)]
    missing = {pair for mix in mixes for pair in _pairs(mix)}
    chosen: list[Mix] = []
    while missing:
        best = max(mixes, key=lambda mix: len(missing & _pairs(mix)))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


def _pairs(mix: Mix) -> set[tuple[tuple[str, object], ...]]:
    named = [(name, getattr(mix, name)) for name in ("budget", "alignment", "cache", "pool", "order")]
    return set(combinations(named, 2))
