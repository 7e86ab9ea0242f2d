"""Runs of the simulator over plain lengths: so many requests open at once, or arrivals at given times."""

from collections.abc import Sequence

from benchmarks.driving import Lengths
from kv_cache import BlockManager
from scheduler import Scheduler, SchedulerConfig
from scheduler.arrivals import Arrival, Work
from scheduler.listening import RunListener
from scheduler.outputs import SchedulerOutputs
from scheduler.records import StepRecord
from scheduler.run_report import RunReport
from scheduler.simulator import Simulator
from scheduler.step_model import StepTimer

BLOCK_SIZE = 16


class DecodeSteps(RunListener):
    """How long the steps took in which answers were running: what the governor is about."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[float, bool]] = {}
        self.durations_s: list[float] = []

    def planned(self, outputs: SchedulerOutputs, record: StepRecord) -> None:
        if not outputs.is_empty:
            self._open[outputs.step_id] = (record.time_s, record.num_decodes > 0)

    def settled(self, outputs: SchedulerOutputs, now: float, tokens: list[tuple[str, int]]) -> None:
        began_s, has_decodes = self._open.pop(outputs.step_id)
        if has_decodes:
            self.durations_s.append(now - began_s)


def simulate(
    lengths: Sequence[Lengths],
    config: SchedulerConfig,
    steps: StepTimer,
    *,
    arrivals_s: Sequence[float] | None = None,
    concurrency: int | None = None,
    listeners: Sequence[RunListener] = (),
) -> RunReport:
    """In a pool that holds everything. Exactly one of `arrivals_s` and `concurrency` is given."""
    num_blocks = sum((num_in + num_out) // BLOCK_SIZE + 2 for num_in, num_out in lengths)
    blocks = BlockManager(BLOCK_SIZE, num_blocks * 11 // 10 + 2, 0)
    report = RunReport(blocks)
    simulator = Simulator(Scheduler(config, blocks), BLOCK_SIZE, steps, [report, *listeners], concurrency=concurrency)
    times_s = arrivals_s or [0.0] * len(lengths)
    simulator.run(
        Work(Arrival(str(number), arrival_s, num_in, num_out, config.max_model_len), [num_out])
        for number, (arrival_s, (num_in, num_out)) in enumerate(zip(times_s, lengths, strict=True))
    )
    return report
