"""What a replay and a simulation tell while they run, and which sequences take a token from a step."""

from collections.abc import Mapping

from scheduler.arrivals import Arrival
from scheduler.outputs import SchedulerOutputs, SequenceEnd
from scheduler.records import StepRecord
from scheduler.sequence import Sequence, SequenceGroup


class RunListener:
    """Hears of a run in its order; whoever listens overrides what it wants to hear. Times are on the run's clock."""

    def arrived(self, arrival: Arrival) -> None:
        """A request was taken in."""

    def refused(self, arrival: Arrival) -> None:
        """A request can never run."""

    def planned(self, outputs: SchedulerOutputs, record: StepRecord) -> None:
        """A step was planned, empty ones included."""

    def settled(self, outputs: SchedulerOutputs, now: float, tokens: list[tuple[str, int]]) -> None:
        """A step has ended; `tokens` has a (request, sample) pair for each token that it gave."""

    def ended(self, ends: list[SequenceEnd], now: float) -> None:
        """Samples have ended, whatever the reason."""


def sampling_sequences(
    outputs: SchedulerOutputs, groups: Mapping[str, SequenceGroup]
) -> list[tuple[SequenceGroup, Sequence]]:
    """Those that take a token from this step, siblings that are about to part included, beams not."""
    found: list[tuple[SequenceGroup, Sequence]] = []
    for chunk in outputs.chunks:
        if not chunk.do_sample:
            continue
        group = groups[chunk.request_id]
        if group.is_beam:
            continue
        if chunk.sample_indices is None:
            found.append((group, group.sequences[chunk.seq_id - group.sequences[0].seq_id]))
        else:
            found += [(group, group.sequences[index]) for index in chunk.sample_indices]
    return found
