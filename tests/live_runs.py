"""Requests that arrive in real time at a real engine, for recordings of live runs."""

import time
from dataclasses import dataclass
from random import Random

from worker.engine import Engine
from worker.types import BeamParams, EngineRequest, SamplingParams


@dataclass(slots=True)
class LiveRequest:
    """`arrival_s` and `cancel_s` are counted from the start of the run; `finish_after`: (sample, tokens)."""

    request: EngineRequest
    arrival_s: float
    cancel_s: float | None = None
    finish_after: tuple[int, int] | None = None


def random_live_requests(
    rng: Random,
    count: int,
    *,
    vocab_size: int,
    mean_gap_s: float,
    prompt_tokens: tuple[int, int],
    output_tokens: tuple[int, int],
    cancel_share: float = 0.1,
    has_groups: bool = True,
) -> list[LiveRequest]:
    """Poisson arrivals; some prompts share a beginning, some have several samples or beams, some are cancelled."""
    shared = [rng.randrange(3, vocab_size) for _ in range(prompt_tokens[1])]
    found: list[LiveRequest] = []
    now = 0.0
    for number in range(count):
        now += rng.expovariate(1.0 / mean_gap_s)
        prompt = [rng.randrange(3, vocab_size) for _ in range(rng.randint(*prompt_tokens))]
        if rng.random() < 0.3:
            prompt = (shared[: rng.randrange(prompt_tokens[1])] + prompt)[: prompt_tokens[1]]
        kind = rng.random() if has_groups else 1.0
        num_output_tokens = rng.randint(*output_tokens)
        params = SamplingParams(
            num_output_tokens,
            n=rng.randint(2, 4) if kind < 0.1 else 1,
            temperature=rng.choice([0.0, 0.3, 1.0]),
            seed=number,
            ignore_eos=rng.random() < 0.5,
        )
        if 0.1 <= kind < 0.15:
            params = SamplingParams(num_output_tokens, n=2, beam=BeamParams(rng.randint(2, 3)))
        request = EngineRequest(
            f"live-{number}", prompt, params, priority=rng.randint(0, 2), tenant=rng.choice(["one", "two"])
        )
        live = LiveRequest(request, now)
        if rng.random() < cancel_share:
            live.cancel_s = now + rng.random() * 20 * mean_gap_s
        elif params.beam is None and rng.random() < 0.1:
            live.finish_after = (rng.randrange(params.n), rng.randint(1, num_output_tokens))
        found.append(live)
    return found


def run_live(engine: Engine, requests: list[LiveRequest]) -> None:
    """Add, cancel and step in real time until all requests have ended. `requests` are in the order of arrival."""
    began_s = time.monotonic()
    cancels = sorted((r.cancel_s, r.request.request_id) for r in requests if r.cancel_s is not None)
    finishes = {r.request.request_id: r.finish_after for r in requests if r.finish_after is not None}
    num_tokens: dict[tuple[str, int], int] = {}
    place = 0
    while place < len(requests) or engine.has_unfinished():
        now = time.monotonic()
        while place < len(requests) and requests[place].arrival_s <= now - began_s:
            engine.add_request(requests[place].request, began_s + requests[place].arrival_s)
            place += 1
        while cancels and cancels[0][0] <= now - began_s:
            engine.abort(cancels.pop(0)[1])
        if not engine.has_unfinished():
            time.sleep(max(requests[place].arrival_s - (now - began_s), 0.0) if place < len(requests) else 0.0)
            continue
        for event in engine.step(time.monotonic()):
            key = (event.request_id, event.index)
            num_tokens[key] = num_tokens.get(key, 0) + len(event.token_ids)
            if finishes.get(event.request_id) == (event.index, num_tokens[key]):
                engine.finish(event.request_id, event.index, num_tokens[key])
    engine.check_integrity()
