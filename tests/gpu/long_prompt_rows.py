"""The promise itself: many answers are streaming, a long prompt comes, and how long they wait between two tokens.

The whole engine (scheduler, cache, runner, sampler) over a random Llama, once with each policy.
"""

import math
import time
from dataclasses import dataclass

from tests.gpu.backends import TIMED_BACKEND, TIMED_BLOCK_SIZE
from tests.gpu.models import RandomEngine, cache_bytes_per_token, weight_bytes
from tests.gpu.parts import Bench, Case
from tests.gpu.report import Outcome, Verdict, judged
from tests.gpu.steps import blocks_for
from worker.config import EngineConfig
from worker.engine import Engine
from worker.types import EngineRequest, SamplingParams

LONG = "long"


@dataclass(frozen=True, slots=True)
class Gaps:
    """Milliseconds between two tokens of an answer that streams while the prompt is computed, and the long prompt's
    time to its first token. `num_missing`: answers that ended early."""

    p50_ms: float
    p99_ms: float
    worst_ms: float
    prompt_s: float
    num_missing: int


def cases(bench: Bench) -> list[Case]:
    found: dict[str, Gaps] = {}
    return [
        Case("chunked_prefill", lambda: run(bench, found, "chunked_prefill")),
        Case("default", lambda: run(bench, found, "default")),
        Case("chunked against default", lambda: compare(bench, found)),
    ]


def run(bench: Bench, found: dict[str, Gaps], policy: str) -> Outcome:
    sizes, model = bench.sizes.long_prompt, bench.sizes.long_prompt_model
    max_tokens = sizes.num_steps_before + sizes.num_steps_after + 2 * blocks_for(sizes.long_len, sizes.budget) + 50
    block_size = TIMED_BLOCK_SIZE[bench.device]
    num_blocks = 2 + blocks_for(sizes.long_len + 100, block_size)
    num_blocks += (sizes.num_answers + 2) * blocks_for(sizes.prompt_len + max_tokens, block_size)
    num_bytes = num_blocks * block_size * cache_bytes_per_token(model, bench.sizes.dtype)
    if not bench.has_memory_for(weight_bytes(model, bench.sizes.dtype) + num_bytes):
        return Outcome("the device has not the memory for it", verdict=Verdict.LEFT_OUT)
    config = EngineConfig(
        device=bench.device,
        attention_backend=TIMED_BACKEND[bench.device],
        block_size=block_size,
        scheduler_policy=policy,
        max_model_len=sizes.long_len + 100,
        max_num_batched_tokens=sizes.budget if policy == "chunked_prefill" else None,
        max_num_seqs=sizes.num_answers + 1,
        num_device_blocks=num_blocks,
        num_host_blocks=1,
        enable_prefix_caching=False,
    )
    engine = RandomEngine(model, bench.sizes.dtype, config)
    found[policy] = gaps = measure(engine, bench, max_tokens)
    text = (
        f"{sizes.num_answers} answers: p50 {gaps.p50_ms:.1f}, p99 {gaps.p99_ms:.1f}, worst {gaps.worst_ms:.1f} ms "
        f"between tokens; prompt of {sizes.long_len} in {gaps.prompt_s:.2f} s"
    )
    figures = {"p99_ms": gaps.p99_ms, "worst_ms": gaps.worst_ms, "prompt_s": gaps.prompt_s}
    return judged(gaps.num_missing == 0, text + (f"; {gaps.num_missing} ended early" * bool(gaps.num_missing)), figures)


def compare(bench: Bench, found: dict[str, Gaps]) -> Outcome:
    """Fails on a device where chunks do not bring the worst gap below that of a whole prompt."""
    if len(found) < 2:
        return Outcome("one of the two was not measured", verdict=Verdict.FAILED)
    chunked, whole = found["chunked_prefill"], found["default"]
    p99, worst = whole.p99_ms / chunked.p99_ms, whole.worst_ms / chunked.worst_ms
    text = f"default's p99 is {p99:.1f} times as long, its worst gap {worst:.1f} times"
    return judged(bench.sizes.is_dry_run or worst > 1, text, {"p99_ratio": p99, "worst_ratio": worst})


def measure(engine: Engine, bench: Bench, max_tokens: int) -> Gaps:
    sizes = bench.sizes.long_prompt
    params = SamplingParams(max_tokens, temperature=0.0, ignore_eos=True)
    for number in range(sizes.num_answers):
        prompt = [(number * 7 + place) % 100 + 3 for place in range(sizes.prompt_len)]
        engine.add_request(EngineRequest(str(number), prompt, params), time.monotonic())
    newest: dict[str, float] = {}
    while len(newest) < sizes.num_answers:
        _step(engine, newest)
    gaps: list[float] = []
    for _ in range(sizes.num_steps_before):
        _step(engine, newest)  # everything is warm before it counts
    prompt = [place % 100 + 3 for place in range(sizes.long_len)]
    sent_s = time.monotonic()
    engine.add_request(
        EngineRequest(LONG, prompt, SamplingParams(sizes.num_steps_after, temperature=0.0, ignore_eos=True)), sent_s
    )
    while LONG not in newest:
        gaps += _step(engine, newest)
    prompt_s = newest.pop(LONG) - sent_s
    for _ in range(sizes.num_steps_after):
        gaps += _step(engine, newest)
    num_missing = sizes.num_answers - sum(group != LONG for group in _running(engine))
    for request_id in list(_running(engine)):
        engine.abort(request_id)
    while engine.has_unfinished():
        engine.step(time.monotonic())
    engine.check_integrity()
    gaps.sort()
    return Gaps(
        gaps[len(gaps) // 2] * 1000,
        gaps[min(len(gaps) - 1, math.ceil(len(gaps) * 0.99) - 1)] * 1000,
        gaps[-1] * 1000,
        prompt_s,
        num_missing,
    )


def _step(engine: Engine, newest: dict[str, float]) -> list[float]:
    """Gaps, in seconds, that this step's tokens end; `newest` becomes when each request had its newest token."""
    events = engine.step(time.monotonic())
    now = time.monotonic()
    gaps = []
    for event in events:
        if event.token_ids:
            if event.request_id in newest and event.request_id != LONG:
                gaps.append(now - newest[event.request_id])
            newest[event.request_id] = now
    return gaps


def _running(engine: Engine) -> list[str]:
    return [group.request_id for group in engine.scheduler.queues.running]
