"""Replay: the recorded inputs go through the same Scheduler and BlockManager again, decision by decision.

Owns the comparison with the recorded digests, and what each request came to (`works`), for runs on another clock.
"""

from collections import deque
from dataclasses import dataclass, field

from scheduler.arrivals import STOP_TOKEN as STOP
from scheduler.arrivals import Arrival, Work, own_token
from scheduler.config import SchedulerConfig
from scheduler.decisions import DecisionDigest, describe_step
from scheduler.limits import StepLimits
from scheduler.listening import RunListener, sampling_sequences
from scheduler.outputs import SchedulerOutputs, SequenceEnd
from scheduler.recording_reader import Ended, Finished, Planned, Pools, Rates, Recording, RecordingError, Settled
from scheduler.requests import RequestTooLargeError
from scheduler.scheduler import Scheduler, SchedulerStuckError
from scheduler.sequence import Sequence, SequenceGroup, SequenceStatus


@dataclass(slots=True)
class Difference:
    """The first step that was decided otherwise than recorded; `decision` is what it was this time."""

    step_id: int
    time_s: float
    decision: str


@dataclass(slots=True)
class Replayed:
    """`num_identical_steps` are those before the first difference: from there on nothing can be compared."""

    num_requests: int = 0
    num_steps: int = 0
    num_identical_steps: int = 0
    difference: Difference | None = None
    works: list[Work] = field(default_factory=list)
    rates: tuple[float, float] | None = None

    @property
    def identical_share(self) -> float:
        return self.num_identical_steps / self.num_steps if self.num_steps else 1.0


class Replayer:
    """Runs a recording once, under its own options (and those that took their place meanwhile) or under others."""

    def __init__(
        self,
        recording: Recording,
        listeners: list[RunListener],
        config: SchedulerConfig | None = None,
        pools: Pools | None = None,
    ) -> None:
        self._recording = recording
        self._has_own_options = config is not None
        self.listeners = listeners
        self.blocks = (pools or recording.pools).make()
        self.scheduler = Scheduler(config or recording.config, self.blocks)
        self._digest = DecisionDigest(self.blocks.block_size)
        self._groups: dict[str, SequenceGroup] = {}
        self._works: dict[str, Work] = {}
        #: steps with their groups: an id may stand for another one before they have ended
        self._in_flight: deque[tuple[SchedulerOutputs, dict[str, SequenceGroup]]] = deque()
        self._result = Replayed()

    def run(self) -> Replayed:
        """Until the recording ends, or a step is decided otherwise; the steps after that one are only counted."""
        for event in self._recording.events():
            if isinstance(event, Planned):
                self._result.num_steps += 1
            if self._result.difference is None:
                self._apply(event)
        for request_id, group in self._groups.items():
            self._remember(request_id, group, is_cut=True)
        return self._result

    def _apply(self, event: Arrival | Ended | Finished | Rates | StepLimits | Planned | Settled) -> None:
        if isinstance(event, Planned):
            self._plan(event)
        elif isinstance(event, Settled):
            self._settle(event)
        elif isinstance(event, Arrival):
            self._add(event)
        elif isinstance(event, Rates):
            self._result.rates = (event.prefill_tokens_per_s, event.swap_blocks_per_s)
            self.scheduler.set_rates(event.prefill_tokens_per_s, event.swap_blocks_per_s)
        elif isinstance(event, StepLimits):
            if not self._has_own_options:
                self.scheduler.set_limits(event)
        elif isinstance(event, Ended):
            if event.status is SequenceStatus.FINISHED_ABORTED and event.request_id in self._works:
                self._works[event.request_id].cancel_s = event.time_s
            self._note(self.scheduler.end(event.request_id, event.status), event.time_s)
        else:
            self._note(self.scheduler.finish(event.request_id, event.index), event.time_s)

    def _add(self, arrival: Arrival) -> None:
        self._result.num_requests += 1
        work = Work(arrival, [], [[] for _ in range(arrival.num_samples)])
        self._result.works.append(work)
        try:
            self._groups[arrival.request_id] = self.scheduler.add(arrival.to_request())
        except RequestTooLargeError:
            work.num_output_tokens = [arrival.max_tokens] * arrival.num_samples
            for listener in self.listeners:
                listener.refused(arrival)
            return
        self._works[arrival.request_id] = work
        for listener in self.listeners:
            listener.arrived(arrival)

    def _plan(self, event: Planned) -> None:
        try:
            outputs = self.scheduler.schedule(event.time_s)
        except SchedulerStuckError as error:
            step_id = self._result.num_steps
            self._result.difference = Difference(step_id, event.time_s, f"stuck: {error}")
            return
        record = self.scheduler.records.newest
        if self._digest.of_step(outputs, record) != event.digest:
            self._result.difference = Difference(outputs.step_id, event.time_s, describe_step(outputs, record))
            return
        self._result.num_identical_steps += 1
        for listener in self.listeners:
            listener.planned(outputs, record)
        self._note(outputs.ended, event.time_s, is_digested=True)
        if not outputs.is_empty:
            groups = {chunk.request_id: self._groups[chunk.request_id] for chunk in outputs.chunks}
            self._in_flight.append((outputs, groups))

    def _settle(self, event: Settled) -> None:
        if not self._in_flight or self._in_flight[0][0].step_id != event.step_id:
            raise RecordingError(f"step {event.step_id} ends in the recording, but was not planned: lines are missing")
        outputs, groups = self._in_flight.popleft()
        sampling = sampling_sequences(outputs, groups)
        tokens = [(group.request_id, seq.index) for group, seq in sampling if not seq.status.is_finished]
        samples: dict[int, list[int]] = {}
        for group, seq in sampling:
            samples[seq.seq_id] = _sample(group, seq, event, samples)
        beams: dict[str, list[tuple[int, int]]] = {}
        for request_id, places in event.beams.items():
            live = groups[request_id].live
            beams[request_id] = [(live[parent].seq_id, own_token(place)) for place, parent in enumerate(places)]
            self._works[request_id].beam_parents.append(places)
        for group, seq in sampling:
            if keys := event.block_keys.get(seq.seq_id):
                self._works[group.request_id].output_keys[seq.index] += keys
        ends = self.scheduler.update(
            event.step_id, samples, event.time_s, block_keys=event.block_keys, beams=beams
        )
        for listener in self.listeners:
            listener.settled(outputs, event.time_s, tokens)
        self._note(ends, event.time_s)

    def _note(self, ends: list[SequenceEnd], now: float, *, is_digested: bool = False) -> None:
        if not is_digested:
            self._digest.note_ends(ends)
        if not ends:
            return
        for listener in self.listeners:
            listener.ended(ends, now)
        for request_id in dict.fromkeys(end.request_id for end in ends):
            group = self._groups[request_id]
            self._remember(request_id, group, is_cut=False)
            if group.is_finished:
                del self._groups[request_id]

    def _remember(self, request_id: str, group: SequenceGroup, *, is_cut: bool) -> None:
        """How long the answers became; one whose client left, as long as they may become."""
        work, arrival = self._works[request_id], self._works[request_id].arrival
        limit = min(arrival.max_tokens, arrival.max_num_tokens - arrival.num_prompt_tokens)
        is_open = not is_cut and not arrival.is_beam
        work.num_output_tokens = [
            limit if is_open and seq.status is SequenceStatus.FINISHED_ABORTED else seq.num_output_tokens
            for seq in group.sequences
        ]


def _sample(
    group: SequenceGroup, seq: Sequence, event: Settled, samples: dict[int, list[int]]
) -> list[int]:
    """As many tokens as recorded, equal to those of a sibling exactly where the real ones were."""
    count, is_stopped = event.counts.get(seq.seq_id, (1, False))
    token_ids = [own_token(seq.index)] * count
    if seq.seq_id in event.same:
        sibling_id, num_common = event.same[seq.seq_id]
        sibling = group.sequences[sibling_id - group.sequences[0].seq_id]
        place = len((seq if group.is_forked else group.live[0]).token_ids)
        known = sibling.token_ids[place : place + num_common] or samples[sibling_id]
        token_ids[:num_common] = known[:num_common]
    if is_stopped:
        token_ids[-1] = STOP
    return token_ids
