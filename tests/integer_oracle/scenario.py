"""Random scenarios: requests, cancels and limits, played through scheduler and block manager on the integer runner."""

from collections import deque
from dataclasses import dataclass, field
from random import Random

from kv_cache import BlockManager
from scheduler import (
    PreemptionMode,
    RequestTooLargeError,
    Scheduler,
    SchedulerConfig,
    SchedulerPolicy,
    SequenceEnd,
    SequenceGroup,
    StopRules,
)
from tests.integer_oracle.invariants import StepChecker
from tests.integer_oracle.runner import STOP_TOKEN_ID, VOCAB_SIZE, IntegerRunner, solo_tokens

MAX_STEPS = 20_000


@dataclass(slots=True)
class Arrival:
    step: int
    request_id: str
    prompt: list[int]
    output: list[int]
    max_tokens: int
    cancel_step: int | None


@dataclass(slots=True)
class Scenario:
    config: SchedulerConfig
    block_size: int
    num_device_blocks: int
    num_host_blocks: int
    arrivals: list[Arrival]
    num_steps_in_flight: int = 1


@dataclass(slots=True)
class Played:
    """What happened, for assertions about a whole run."""

    num_steps: int = 0
    num_recomputes: int = 0
    num_swaps: int = 0
    num_refused: int = 0
    reasons: set[str] = field(default_factory=set)


def random_scenario(rng: Random, policy: SchedulerPolicy, mode: PreemptionMode) -> Scenario:
    block_size = rng.choice([1, 2, 4, 16])
    max_model_len = rng.choice([24, 60, 120])
    min_blocks = -(-max_model_len // block_size) + 1
    budget = rng.choice([8, 16, 64, 256])
    if policy is SchedulerPolicy.DEFAULT:
        budget = max_model_len + rng.randrange(3) * 40
    max_num_seqs = rng.randint(1, min(budget, 12))
    config = SchedulerConfig(
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        policy=policy,
        preemption_mode=mode,
        chunk_alignment=rng.choice([1, 1, 4, 16, 256]),
        max_num_partial_prefills=rng.choice([0, 0, 1, 2]),
        long_prefill_threshold=rng.choice([0, 0, 10, 30]),
        min_prefill_tokens=0,
    )
    # Sometimes the pool is smaller than the longest sequence: such requests outgrow it.
    num_device_blocks = max(2, int(min_blocks * rng.choice([0.6, 1.0, 1.0, 1.5, 8.0])))
    arrivals = []
    for number in range(rng.randint(1, 14)):
        step = rng.randrange(30) if rng.random() < 0.7 else 0
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, max_model_len))]
        if rng.random() < 0.5:
            prompt = prompt[: rng.randint(1, 12)]
        cancel_step = step + rng.randrange(25) if rng.random() < 0.2 else None
        arrivals.append(Arrival(step, f"r{number}", prompt, [], rng.randint(1, 40), cancel_step))
    return Scenario(
        config,
        block_size,
        num_device_blocks,
        rng.choice([0, 3, num_device_blocks, 4 * num_device_blocks]),
        arrivals,
        num_steps_in_flight=rng.choice([1, 1, 2]),
    )


class Player:
    """Plays one scenario and asserts the invariants and every request's tokens."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._blocks = BlockManager(scenario.block_size, scenario.num_device_blocks, scenario.num_host_blocks)
        self.scheduler = Scheduler(scenario.config, self._blocks)
        self._runner = IntegerRunner(scenario.block_size, scenario.num_device_blocks, scenario.num_host_blocks)
        self._checker = StepChecker(self.scheduler, self._blocks)
        self._groups: dict[str, SequenceGroup] = {}
        self._ends: dict[str, str] = {}
        self._in_flight: deque[tuple[int, dict[int, list[int]]]] = deque()
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
            step += 1
            assert step < MAX_STEPS, "the scenario does not end"
        self._check_answers()
        assert self._blocks.num_used_device_blocks == 0
        assert self._blocks.num_used_host_blocks == 0
        assert self.scheduler.num_queued_tokens() == 0
        return self.played

    def _arrive(self, arrival: Arrival) -> None:
        rules = StopRules(
            arrival.max_tokens, self._scenario.config.max_model_len, 0, frozenset({STOP_TOKEN_ID})
        )
        try:
            group = self.scheduler.add(arrival.request_id, arrival.prompt, rules, 0.0, arrival.output)
        except RequestTooLargeError:
            self.played.num_refused += 1
            return
        self._groups[arrival.request_id] = group

    def _step(self, step: int) -> None:
        self._checker.before()
        outputs = self.scheduler.schedule(float(step))
        self._checker.check(outputs)
        record = self.scheduler.records.newest
        self.played.num_recomputes += sum(p.mode == "recompute" for p in record.preemptions)
        self.played.num_swaps += sum(p.mode == "swap" for p in record.preemptions)
        self.played.reasons |= {str(r) for r in (record.waiting_reason, record.swapped_reason) if r}
        self._note(outputs.ended)
        if not outputs.is_empty:
            self.played.num_steps += 1
            self._in_flight.append((outputs.step_id, self._runner.execute(outputs)))
        if self._in_flight and (len(self._in_flight) >= self._scenario.num_steps_in_flight or outputs.is_empty):
            step_id, samples = self._in_flight.popleft()
            self._note(self.scheduler.update(step_id, samples, step + 0.5))
            self._blocks.check_integrity()

    def _note(self, ends: list[SequenceEnd]) -> None:
        for end in ends:
            assert end.request_id not in self._ends, "a request ended twice"
            self._ends[end.request_id] = end.finish_reason

    def _check_answers(self) -> None:
        num_pool_tokens = self._blocks.num_usable_device_blocks * self._scenario.block_size
        for request_id, group in self._groups.items():
            seq = group.sequences[0]
            arrival = next(a for a in self._scenario.arrivals if a.request_id == request_id)
            rules = group.stop_rules
            expected, reason = solo_tokens(
                arrival.prompt, rules.max_tokens, rules.max_num_tokens, rules.stop_token_ids, num_pool_tokens
            )
            output = seq.token_ids[seq.num_prompt_tokens :]
            if self._ends[request_id] == "abort":
                assert output == expected[: len(output)]
            else:
                assert (output, self._ends[request_id]) == (expected, reason)
