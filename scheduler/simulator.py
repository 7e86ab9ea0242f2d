"""The simulator: the real Scheduler and BlockManager on a virtual clock that a step-time model moves.

Owns the clock and the making-up of tokens. What happened is told to listeners; knows no file formats.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from heapq import heappop, heappush

from scheduler.arrivals import STOP_TOKEN, Work, own_token
from scheduler.listening import RunListener, sampling_sequences
from scheduler.outputs import SchedulerOutputs, SequenceEnd
from scheduler.requests import RequestTooLargeError
from scheduler.scheduler import BeamChoices, Scheduler
from scheduler.sequence import SequenceGroup, SequenceStatus
from scheduler.step_model import StepTimer, step_work


class Simulator:
    """One step at a time, as the engine runs them. Every request takes exactly the tokens that its `Work` says."""

    def __init__(
        self,
        scheduler: Scheduler,
        block_size: int,
        model: StepTimer,
        listeners: list[RunListener],
        *,
        concurrency: int | None = None,
    ) -> None:
        """concurrency: keep so many requests open, whenever they are said to arrive; None: they come at their time."""
        self._scheduler = scheduler
        self._block_size = block_size
        self._model = model
        self._listeners = listeners
        self._concurrency = concurrency
        self._groups: dict[str, SequenceGroup] = {}
        self._works: dict[str, Work] = {}
        self._num_beam_steps: dict[str, int] = {}
        self._cancels: list[tuple[float, str]] = []

    def run(self, works: Iterable[Work]) -> float:
        """Until all is done; returns the clock. `works` come in the order of their arrivals."""
        coming = iter(works)
        next_work = next(coming, None)
        now = next_work.arrival.arrival_s if next_work is not None else 0.0
        while True:
            while next_work is not None and self._is_due(next_work, now):
                self._add(next_work, now)
                next_work = next(coming, None)
            self._cancel(now)
            if self._scheduler.has_unfinished():
                now = self._step(now)
            elif next_work is None:
                return now
            elif self._concurrency is None:
                now = max(now, next_work.arrival.arrival_s)

    def _is_due(self, work: Work, now: float) -> bool:
        if self._concurrency is not None:
            return len(self._groups) < self._concurrency
        return work.arrival.arrival_s <= now

    def _add(self, work: Work, now: float) -> None:
        if self._concurrency is not None:
            work = replace(work, arrival=replace(work.arrival, arrival_s=now))
        arrival = work.arrival
        try:
            group = self._scheduler.add(arrival.to_request())
        except RequestTooLargeError:
            for listener in self._listeners:
                listener.refused(arrival)
            return
        self._groups[arrival.request_id] = group
        self._works[arrival.request_id] = work
        if work.cancel_s is not None:
            heappush(self._cancels, (work.cancel_s, arrival.request_id))
        for listener in self._listeners:
            listener.arrived(arrival)

    def _cancel(self, now: float) -> None:
        while self._cancels and self._cancels[0][0] <= now:
            _, request_id = heappop(self._cancels)
            self._note(self._scheduler.abort(request_id), now)

    def _step(self, now: float) -> float:
        """Plan, run and settle one step; returns when the next one can be planned."""
        outputs = self._scheduler.schedule(now)
        record = self._scheduler.records.newest
        for listener in self._listeners:
            listener.planned(outputs, record)
        self._note(outputs.ended, now)
        if not outputs.is_empty:
            now += self._model.step_s(step_work(outputs, self._block_size))
            self._settle(outputs, now)
        return now + self._model.between_steps_s

    def _settle(self, outputs: SchedulerOutputs, now: float) -> None:
        samples: dict[int, list[int]] = {}
        block_keys: dict[int, list[bytes]] = {}
        tokens: list[tuple[str, int]] = []
        for group, seq in sampling_sequences(outputs, self._groups):
            work = self._works[group.request_id]
            known = seq if group.is_forked else group.live[0]
            is_last = known.num_output_tokens + 1 >= work.num_output_tokens[seq.index]
            samples[seq.seq_id] = [STOP_TOKEN if is_last else own_token(seq.index)]
            key = work.key_of_completed_block(len(known.token_ids) + 1, seq.index, self._block_size)
            if key is not None:
                block_keys[seq.seq_id] = [key]
            tokens.append((group.request_id, seq.index))
        beams, done = self._advance_beams(outputs)
        ends = self._scheduler.update(outputs.step_id, samples, now, block_keys=block_keys, beams=beams)
        for listener in self._listeners:
            listener.settled(outputs, now, tokens)
        self._note(ends, now)
        for request_id in done:
            self._note(self._scheduler.end(request_id, SequenceStatus.FINISHED_STOPPED), now)

    def _advance_beams(self, outputs: SchedulerOutputs) -> tuple[dict[str, BeamChoices], list[str]]:
        """What each beam search goes on with, and those that have no more steps."""
        beams: dict[str, BeamChoices] = {}
        done: list[str] = []
        for request_id in self._beams_of(outputs):
            group, parents = self._groups[request_id], self._works[request_id].beam_parents
            step = self._num_beam_steps.get(request_id, 0)
            self._num_beam_steps[request_id] = step + 1
            if step < len(parents) and parents[step]:
                beams[request_id] = [
                    (group.live[parent].seq_id, own_token(place)) for place, parent in enumerate(parents[step])
                ]
            else:
                # Going on as it is, for the scheduler wants to know of every row, until it is ended below.
                beams[request_id] = [(seq.seq_id, own_token(place)) for place, seq in enumerate(group.live)]
                done.append(request_id)
        return beams, done

    def _beams_of(self, outputs: SchedulerOutputs) -> Iterator[str]:
        seen: set[str] = set()
        for chunk in outputs.chunks:
            if chunk.do_sample and chunk.request_id not in seen and self._groups[chunk.request_id].is_beam:
                seen.add(chunk.request_id)
                yield chunk.request_id

    def _note(self, ends: list[SequenceEnd], now: float) -> None:
        if not ends:
            return
        for listener in self._listeners:
            listener.ended(ends, now)
        for end in ends:
            group = self._groups.get(end.request_id)
            if group is not None and group.is_finished:
                del self._groups[end.request_id], self._works[end.request_id]
                self._num_beam_steps.pop(end.request_id, None)
