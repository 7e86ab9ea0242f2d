"""Steps planned while the step before runs (`async_scheduling`): the same tokens, and what a step then takes."""

import time
from itertools import pairwise
from statistics import median

from tests.gpu.backends import TIMED_BACKEND, TIMED_BLOCK_SIZE
from tests.gpu.models import RandomEngine
from tests.gpu.parts import Bench, Case
from tests.gpu.report import Outcome, Verdict
from tests.gpu.steps import blocks_for
from tests.gpu.timing import wait_for
from tests.gpu.tiny_answers import MAX_MODEL_LEN, TinyModel
from tests.oracle.engine_runs import run_on
from worker.config import EngineConfig
from worker.engine import Engine
from worker.types import EngineRequest, SamplingParams

BLOCK_SIZE = 16
#: of the requests that are timed
PROMPT_LEN = 64


def cases(bench: Bench) -> list[Case]:
    model, step_ms = TinyModel(), {}
    timed = f"batch {bench.sizes.overlap_batch} of {bench.sizes.overlap_model.name}"
    return [
        Case("tokens with overlap", lambda: tokens(bench, model, is_on=True)),
        Case("tokens without", lambda: tokens(bench, model, is_on=False)),
        Case(f"{timed}, without", lambda: step_time(bench, step_ms, is_on=False)),
        Case(f"{timed}, with overlap", lambda: step_time(bench, step_ms, is_on=True)),
    ]


def tokens(bench: Bench, model: TinyModel, *, is_on: bool) -> Outcome:
    """Against Transformers alone, with little room, so that answers are also preempted."""
    config = EngineConfig(
        model=str(model.folder),
        dtype="float32",
        device=bench.device,
        attention_backend=TIMED_BACKEND[bench.device],
        async_scheduling=is_on,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=64,
        max_num_seqs=8,
        block_size=BLOCK_SIZE,
        chunk_alignment=BLOCK_SIZE,
        num_device_blocks=MAX_MODEL_LEN // BLOCK_SIZE + 3,
        num_host_blocks=100,
    )
    engine = Engine(config)
    answered = run_on(engine, model.prompts, model.params)
    totals = answered.totals
    outcome = model.compare(answered)
    if not totals.num_preemptions_recompute + totals.num_preemptions_swap:
        return Outcome(f"nothing was preempted; {outcome.text}", outcome.figures, Verdict.FAILED)
    return outcome


def step_time(bench: Bench, found: dict[bool, float], *, is_on: bool) -> Outcome:
    """Milliseconds from one step's tokens to the next one's, greedy, where all requests decode."""
    sizes = bench.sizes
    block_size, longest = TIMED_BLOCK_SIZE[bench.device], PROMPT_LEN + sizes.overlap_tokens + 1
    config = EngineConfig(
        device=bench.device,
        attention_backend=TIMED_BACKEND[bench.device],
        async_scheduling=is_on,
        block_size=block_size,
        max_model_len=longest,
        max_num_batched_tokens=max(2048, sizes.overlap_batch),
        max_num_seqs=sizes.overlap_batch,
        num_device_blocks=2 + (sizes.overlap_batch + 1) * blocks_for(longest, block_size),
        num_host_blocks=1,
        enable_prefix_caching=False,
    )
    engine = RandomEngine(sizes.overlap_model, sizes.dtype, config)
    params = SamplingParams(sizes.overlap_tokens, temperature=0.0, ignore_eos=True)
    for number in range(sizes.overlap_batch):
        prompt = [(number * 7 + place) % 100 + 3 for place in range(PROMPT_LEN)]
        engine.add_request(EngineRequest(str(number), prompt, params), time.monotonic())
    times_s = []
    while engine.has_unfinished():
        events = engine.step(time.monotonic())
        if len(events) == sizes.overlap_batch:
            times_s.append(time.perf_counter())
    wait_for(bench.device)
    engine.check_integrity()
    spans = [later - earlier for earlier, later in pairwise(times_s)]
    found[is_on] = step_ms = median(spans[len(spans) // 4 :]) * 1000
    text = f"{step_ms:.2f} ms a step"
    if is_on and False in found:
        text += f", {found[False] / step_ms:.2f} times as fast"
    return Outcome(text, {"step_ms": step_ms})
