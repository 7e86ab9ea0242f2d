"""Plays a scenario on the integer runner, asserting the invariants and every request's tokens."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kv_cache import BlockKey, BlockManager
from scheduler import (
    BeamChoices,
    Request,
    RequestTooLargeError,
    Scheduler,
    SequenceEnd,
    SequenceGroup,
    SequenceStatus,
    StopRules,
)
from tests.integer_oracle.invariants import StepChecker
from tests.integer_oracle.runner import (
    STOP_TOKEN_ID,
    IntegerRunner,
    beam_candidates,
    next_token,
    solo_beams,
    solo_tokens,
)
from tests.integer_oracle.scenario import Arrival, Scenario

MAX_STEPS = 20_000
UNLIMITED = 10**9


@dataclass(slots=True)
class Played:
    """What happened, for assertions about a whole run. `outputs` and `ends` are by (request, sample)."""

    num_steps: int = 0
    num_recomputes: int = 0
    num_swaps: int = 0
    num_refused: int = 0
    num_hit_blocks: int = 0
    num_copied_blocks: int = 0
    reasons: set[str] = field(default_factory=set)
    outputs: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    ends: dict[tuple[str, int], str] = field(default_factory=dict)


@dataclass(slots=True)
class _InFlight:
    step_id: int
    samples: dict[int, list[int]]
    read: dict[int, tuple[int, ...]]


class Player:
    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self.blocks = BlockManager(scenario.block_size, scenario.num_device_blocks, scenario.num_host_blocks)
        self.scheduler = Scheduler(scenario.config, self.blocks)
        self.scheduler.set_rates(scenario.prefill_tokens_per_s, scenario.swap_blocks_per_s)
        self._runner = IntegerRunner(scenario.block_size, scenario.num_device_blocks, scenario.num_host_blocks)
        self._checker = StepChecker(self.scheduler, self.blocks)
        self._groups: dict[str, SequenceGroup] = {}
        self._arrivals = {arrival.request_id: arrival for arrival in scenario.arrivals}
        self._beam_scores: dict[str, dict[int, int]] = {}
        self._in_flight: deque[_InFlight] = deque()
        self.played = Played()

    def play(self) -> Played:
        arrivals = deque(sorted(self._scenario.arrivals, key=lambda arrival: arrival.step))
        cancels = sorted((a.cancel_step, a.request_id) for a in arrivals if a.cancel_step is not None)
        step = 0
        while arrivals or self.scheduler.has_unfinished() or self._in_flight:
            while arrivals and arrivals[0].step <= step:
                self._arrive(arrivals.popleft())
            while cancels and cancels[0][0] <= step:
                self._note(self.scheduler.abort(cancels.pop(0)[1]))
            self._step(step)
            self.blocks.check_integrity()
            step += 1
            assert step < MAX_STEPS, "the scenario does not end"
        assert self.blocks.num_used_device_blocks == 0
        assert self.blocks.num_used_host_blocks == 0
        assert self.scheduler.num_queued_tokens() == 0
        self.played.num_hit_blocks = self.blocks.prefix_counts.num_hit_blocks
        self._collect()
        return self.played

    def _arrive(self, arrival: Arrival) -> None:
        max_tokens = UNLIMITED if arrival.is_beam else arrival.max_tokens
        stop_token_ids = frozenset({STOP_TOKEN_ID} if arrival.has_stop_token and not arrival.is_beam else ())
        outputs = [solo_tokens(arrival.prompt, index, count) for index, count in enumerate(arrival.num_resumed)]
        request = Request(
            arrival.request_id,
            arrival.prompt,
            StopRules(max_tokens, self._scenario.config.max_model_len, 0, stop_token_ids),
            float(arrival.step),
            arrival.num_samples,
            arrival.is_beam,
            arrival.priority,
            arrival.tenant,
            output_token_ids=outputs,
            block_keys=[self._keys(arrival.prompt + output) for output in outputs or [[]]],
            ended_samples=arrival.ended_samples,
        )
        try:
            self._groups[arrival.request_id] = self.scheduler.add(request)
        except RequestTooLargeError:
            self.played.num_refused += 1

    def _keys(self, token_ids: list[int], first_block: int = 0) -> list[BlockKey]:
        size = self._scenario.block_size
        if not self._scenario.has_prefix_cache:
            return []
        return [
            repr(token_ids[: (block + 1) * size]).encode() for block in range(first_block, len(token_ids) // size)
        ]

    def _step(self, step: int) -> None:
        self._checker.before()
        outputs = self.scheduler.schedule(float(step))
        self._checker.check(outputs)
        record = self.scheduler.records.newest
        self.played.num_recomputes += sum(p.mode == "recompute" for p in record.preemptions)
        self.played.num_swaps += sum(p.mode == "swap" for p in record.preemptions)
        self.played.num_copied_blocks += record.num_blocks_copied
        self.played.reasons |= {str(r) for r in (record.waiting_reason, record.swapped_reason) if r}
        self._note(outputs.ended)
        if not outputs.is_empty:
            self.played.num_steps += 1
            read = self._runner.execute(outputs)
            self._in_flight.append(_InFlight(outputs.step_id, self._sample(read), read))
        if self._in_flight and (len(self._in_flight) >= self._scenario.num_steps_in_flight or outputs.is_empty):
            self._settle(self._in_flight.popleft(), step)

    def _sample(self, read: Mapping[int, tuple[int, ...]]) -> dict[int, list[int]]:
        """One token for each sampling row, and for each sibling that is to part from it."""
        samples: dict[int, list[int]] = {}
        for group in self._groups.values():
            for seq in group.live:
                if seq.seq_id in read and not group.is_beam:
                    for sample in [seq] if group.is_forked else group.sequences:
                        token_id = next_token(read[seq.seq_id], sample.index)
                        samples[sample.seq_id] = [token_id]
                        self._runner.last_samples[sample.seq_id] = token_id
        return samples

    def _settle(self, in_flight: _InFlight, step: int) -> None:
        beams: dict[str, BeamChoices] = {}
        block_keys: dict[int, list[BlockKey]] = {}
        for group in self._groups.values():
            rows = [seq for seq in group.live if seq.seq_id in in_flight.read]
            if group.is_beam and rows:
                beams[group.request_id] = self._choose_beams(group, in_flight.read)
            for seq in group.sequences:
                if seq.seq_id in in_flight.samples:
                    base = group.live[0].token_ids if group.live and not group.is_forked else seq.token_ids
                    token_ids = base + in_flight.samples[seq.seq_id]
                    if len(token_ids) % self._scenario.block_size == 0:
                        block_keys[seq.seq_id] = self._keys(token_ids, len(base) // self._scenario.block_size)
        self._note(
            self.scheduler.update(
                in_flight.step_id, in_flight.samples, step + 0.5, block_keys=block_keys, beams=beams
            )
        )
        self._end_from_outside(beams)

    def _choose_beams(self, group: SequenceGroup, read: Mapping[int, tuple[int, ...]]) -> BeamChoices:
        scores = self._beam_scores.setdefault(group.request_id, {group.live[0].seq_id: 0})
        choices = [
            (scores[seq.seq_id] + score, place, seq.seq_id, token_id)
            for place, seq in enumerate(group.live)
            for score, token_id in beam_candidates(read[seq.seq_id])
        ]
        choices.sort(key=lambda choice: (-choice[0], choice[1], choice[3]))
        best = choices[: self._arrivals[group.request_id].num_samples]
        self._beam_scores[group.request_id] = {place: choice[0] for place, choice in enumerate(best)}
        return [(seq_id, token_id) for _, _, seq_id, token_id in best]

    def _end_from_outside(self, beams: Mapping[str, BeamChoices]) -> None:
        for request_id in beams:
            group = self._groups[request_id]
            scores = self._beam_scores[request_id]
            self._beam_scores[request_id] = {seq.seq_id: scores[place] for place, seq in enumerate(group.live)}
            if group.live and group.live[0].num_output_tokens >= self._arrivals[request_id].max_tokens:
                self.played.outputs |= {
                    (request_id, place): seq.token_ids[seq.num_prompt_tokens :] for place, seq in enumerate(group.live)
                }
                self._note(self.scheduler.end(request_id, SequenceStatus.FINISHED_LENGTH_CAPPED))
        for group in self._groups.values():
            finish = self._arrivals[group.request_id].finish
            if finish is not None and group.is_forked:
                index, num_tokens = finish
                if group.sequences[index].num_output_tokens >= num_tokens:
                    self._note(self.scheduler.finish(group.request_id, index))

    def _note(self, ends: list[SequenceEnd]) -> None:
        for end in ends:
            key = (end.request_id, end.index)
            assert key not in self.played.ends, "a sample ended twice"
            self.played.ends[key] = end.finish_reason

    def _collect(self) -> None:
        for request_id, group in self._groups.items():
            for seq in group.sequences:
                if seq.index in self._arrivals[request_id].ended_samples:
                    assert (request_id, seq.index) not in self.played.ends, "a sample ended again"
                    continue
                assert (request_id, seq.index) in self.played.ends, "a sample never ended"
                if not group.is_beam:
                    self.played.outputs[request_id, seq.index] = seq.token_ids[seq.num_prompt_tokens :]


def check_answers(scenario: Scenario, played: Played) -> None:
    """Every answer is what the integer model says, and ends where it ends when its request is alone."""
    for arrival in scenario.arrivals:
        keys = [key for key in played.ends if key[0] == arrival.request_id]
        if not keys:
            continue
        is_cut = arrival.cancel_step is not None and any(played.ends[key] == "abort" for key in keys)
        undisturbed = replace(arrival, cancel_step=None, num_resumed=(), ended_samples=())
        alone = replace(scenario, arrivals=[undisturbed], num_steps_in_flight=1)
        expected = None if is_cut else Player(alone).play()
        for key in keys:
            output = played.outputs.get(key, [])
            if arrival.is_beam:
                beams = solo_beams(arrival.prompt, arrival.num_samples, len(output))
                assert not output or output == beams[key[1]]
            else:
                assert output == solo_tokens(arrival.prompt, key[1], len(output))
            if expected is not None:
                assert len(output) == len(expected.outputs.get(key, []))
                assert played.ends[key] == expected.ends[key]
