"""Random requests on engines around a model of integers, and their answers on a late device beside those without."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random

from tests.late_device import LateDevice, make_late
from tests.late_integers import LETTERS, IntegerEngine, poison_freed_blocks
from worker.config import EngineConfig
from worker.engine import Engine
from worker.request_checks import RequestError
from worker.types import BeamParams, EngineRequest, SamplingParams, TokenEvent

MAX_TURNS = 5000


@dataclass(slots=True)
class Arrival:
    """`cancel_turn`: aborted before it. `finish`: (sample, tokens) after which the sample ends outside."""

    turn: int
    request: EngineRequest
    cancel_turn: int | None = None
    finish: tuple[int, int] | None = None


@dataclass(slots=True)
class Played:
    answers: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    reasons: dict[tuple[str, int], str] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    events: list[TokenEvent] = field(default_factory=list)
    num_turns: int = 0


def play(engine: Engine, arrivals: list[Arrival]) -> Played:
    """Checks the block accounting after each turn, and that each answer ends once."""
    played = Played()
    while engine.has_unfinished() or any(arrival.turn >= played.num_turns for arrival in arrivals):
        turn = played.num_turns
        for arrival in arrivals:
            request = arrival.request
            if arrival.turn == turn:
                try:
                    engine.add_request(request, engine._clock())
                except RequestError:
                    played.refused.add(request.request_id)
                    continue
                played.answers |= {(request.request_id, index): [] for index in range(request.params.n)}
            if arrival.cancel_turn == turn:
                engine.abort(request.request_id)
        for event in engine.step(engine._clock()):
            played.events.append(event)
            key = (event.request_id, event.index)
            assert key not in played.reasons, "an event after the last one"
            played.answers[key] += event.token_ids
            if event.finish_reason is not None:
                played.reasons[key] = event.finish_reason
        for arrival in arrivals:
            request_id = arrival.request.request_id
            if arrival.finish is not None and request_id not in played.refused and arrival.turn <= turn:
                index, num_tokens = arrival.finish
                if len(played.answers[request_id, index]) >= num_tokens:
                    engine.finish(request_id, index, num_tokens)
        engine.block_manager.check_integrity()
        played.num_turns += 1
        assert played.num_turns < MAX_TURNS, "the scenario does not end"
    engine.check_integrity()
    assert played.reasons.keys() == played.answers.keys()
    return played


def random_scenario(rng: Random) -> tuple[EngineConfig, list[Arrival]]:
    block_size = rng.choice([1, 2, 4, 16])
    max_model_len = rng.choice([30, 60, 120])
    policy = rng.choice(["chunked_prefill", "chunked_prefill", "default"])
    budget = max_model_len + 40 if policy == "default" else rng.choice([8, 16, 64])
    num_blocks = int((-(-max_model_len // block_size) + 1) * rng.choice([1.0, 1.0, 1.2, 1.5, 4.0])) + 1
    config = EngineConfig(
        max_model_len=max_model_len,
        max_num_batched_tokens=budget,
        max_num_seqs=rng.randint(2, 8),
        block_size=block_size,
        num_device_blocks=num_blocks,
        num_host_blocks=rng.choice([1, 4, 4 * num_blocks]),
        scheduler_policy=policy,
        preemption_mode=rng.choice(["recompute", "swap", "swap", "auto"]),
        queue_policy=rng.choice(["fcfs", "priority", "fair"]),
        priority_aging_s=10.0,
        enable_prefix_caching=rng.random() < 0.5,
        chunk_alignment=rng.choice([1, 4, 16]),
    )
    prefix = [rng.choice(LETTERS) for _ in range(max_model_len // 2)]
    return config, [random_arrival(rng, str(number), prefix, max_model_len) for number in range(rng.randint(3, 9))]


def random_arrival(rng: Random, request_id: str, prefix: list[int], max_model_len: int) -> Arrival:
    prompt = [rng.choice(LETTERS) for _ in range(rng.randint(1, max_model_len // 2))]
    if rng.random() < 0.4:
        prompt = (prefix[: rng.randint(1, len(prefix))] + prompt)[: max_model_len - 1]
    num_samples = rng.choice([1, 1, 1, 2, 4])
    is_beam = rng.random() < 0.1
    params = SamplingParams(
        max_tokens=rng.randint(0 if num_samples == 1 and not is_beam else 1, 40),
        n=num_samples,
        temperature=rng.choice([0.0, 1.0]),
        top_p=rng.choice([1.0, 1.0, 0.8]),
        seed=rng.randrange(1000),
        logprobs=rng.choice([None, None, 2]),
        min_tokens=0,
        stop_token_ids=tuple(rng.sample(LETTERS, rng.choice([0, 2, 6]))),
        presence_penalty=rng.choice([0.0, 0.0, 1.1]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        beam=BeamParams(num_samples + 1) if is_beam else None,
    )
    request = EngineRequest(
        request_id,
        prompt,
        params,
        priority=rng.randint(0, 2),
        tenant=rng.choice("ab"),
        cache_salt=rng.choice(["", "s"]),
    )
    turn = rng.randrange(20) if rng.random() < 0.6 else 0
    cancel = turn + rng.randrange(20) if rng.random() < 0.2 else None
    finish = (rng.randrange(num_samples), rng.randint(1, 9)) if not is_beam and rng.random() < 0.2 else None
    return Arrival(turn, request, cancel, finish)


def virtual_clock() -> Callable[[], float]:
    ticks = count()
    return lambda: next(ticks) * 1e-3


def engine_of(config: EngineConfig, *, is_async: bool) -> IntegerEngine:
    return IntegerEngine(replace(config, async_scheduling=is_async), virtual_clock())


def late_engine(
    config: EngineConfig, rng: Random, *, record: str | None = None, **order: bool
) -> tuple[IntegerEngine, LateDevice]:
    engine = engine_of(replace(config, record=record), is_async=True)
    device = make_late(engine, rng, **order)
    poison_freed_blocks(engine, device)
    return engine, device


def check_same(late: Played, plain: Played, arrivals: list[Arrival], max_model_len: int) -> None:
    assert late.refused == plain.refused
    for arrival in arrivals:
        request, params = arrival.request, arrival.request.params
        longest = min(params.max_tokens, max_model_len - len(request.prompt_token_ids))
        for key in (key for key in plain.answers if key[0] == request.request_id):
            ours, theirs = late.answers[key], plain.answers[key]
            is_cut = arrival.cancel_turn is not None or (arrival.finish is not None and arrival.finish[0] == key[1])
            # What several sequences share of the pool depends on whether they were thrown out meanwhile.
            is_several = params.n > 1 or params.beam is not None
            outgrew_pool = is_several and any(
                played.reasons[key] == "length" and len(played.answers[key]) < longest for played in (late, plain)
            )
            if outgrew_pool and params.beam is not None:
                continue  # the best so far, at different lengths
            if is_cut or outgrew_pool:
                shorter = min(len(ours), len(theirs))
                assert ours[:shorter] == theirs[:shorter], key
            else:
                assert (ours, late.reasons[key]) == (theirs, plain.reasons[key]), key
