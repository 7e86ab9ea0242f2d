"""The same work under two sets of options: which steps differ, and what each run came to."""

from dataclasses import dataclass

from scheduler.arrivals import Work
from scheduler.config import SchedulerConfig
from scheduler.decisions import describe_step
from scheduler.listening import RunListener
from scheduler.outputs import SchedulerOutputs
from scheduler.recording_reader import Pools
from scheduler.records import StepRecord
from scheduler.run_report import RunReport
from scheduler.scheduler import Scheduler
from scheduler.simulator import Simulator
from scheduler.step_model import StepModel


class DecisionLog(RunListener):
    """A line about each step, by its id."""

    def __init__(self) -> None:
        self.lines: dict[int, str] = {}

    def planned(self, outputs: SchedulerOutputs, record: StepRecord) -> None:
        self.lines[record.step_id] = describe_step(outputs, record)


@dataclass(slots=True)
class StepDifference:
    """None: the run had no such step."""

    step_id: int
    before: str | None
    after: str | None


def differing_steps(before: DecisionLog, after: DecisionLog) -> list[StepDifference]:
    """Steps of the same number that did not do the same, in their order."""
    step_ids = sorted(before.lines.keys() | after.lines.keys())
    return [
        StepDifference(step_id, before.lines.get(step_id), after.lines.get(step_id))
        for step_id in step_ids
        if before.lines.get(step_id) != after.lines.get(step_id)
    ]


def simulate(
    works: list[Work],
    config: SchedulerConfig,
    pools: Pools,
    model: StepModel,
    rates: tuple[float, float] | None,
    log: DecisionLog | None = None,
) -> RunReport:
    """`works` at their times on a virtual clock. rates: what the engine had measured; None: as the model says."""
    blocks = pools.make()
    scheduler = Scheduler(config, blocks)
    scheduler.set_rates(*(rates or model.rates(config.max_num_batched_tokens, pools.block_size)))
    report = RunReport(blocks)
    listeners: list[RunListener] = [report] if log is None else [report, log]
    Simulator(scheduler, pools.block_size, model, listeners).run(works)
    return report
