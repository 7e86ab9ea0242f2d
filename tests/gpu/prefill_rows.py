"""Prompt tokens a second of random Llamas, and the share of the device's product rate that their operations make."""

from tests.gpu.backends import TIMED_BACKEND, TIMED_BLOCK_SIZE
from tests.gpu.models import (
    OneAtATime,
    cache_bytes_per_token,
    fill_with_noise,
    load_random,
    num_parameters,
    weight_bytes,
)
from tests.gpu.parts import Bench, Case
from tests.gpu.report import Outcome, Verdict
from tests.gpu.sizes import ModelSize
from tests.gpu.steps import blocks_for, prefill_step
from tests.gpu.timing import wall_s
from worker.config import EngineConfig
from worker.loading import LoadedModel


def cases(bench: Bench) -> list[Case]:
    models = OneAtATime()
    return [
        Case(
            f"{size.name} chunk {bench.sizes.prefill_chunk} up to {context}",
            lambda size=size, context=context: time_chunk(bench, models, size, context),
        )
        for size in bench.sizes.models
        for context in bench.sizes.prefill_contexts
    ]


def time_chunk(bench: Bench, models: OneAtATime, size: ModelSize, context: int) -> Outcome:
    sizes = bench.sizes
    cache = max(sizes.prefill_contexts) * cache_bytes_per_token(size, sizes.dtype)
    if not bench.has_memory_for(weight_bytes(size, sizes.dtype) + cache):
        return Outcome("the device has not the memory for it", verdict=Verdict.LEFT_OUT)
    loaded = models.get(size, lambda: load(bench, size))
    step = prefill_step(sizes.prefill_chunk, context, loaded.config.block_size)
    step_s = wall_s(lambda: loaded.runner.execute(step), bench.device, sizes.num_repeats)
    share = num_operations(size, sizes.prefill_chunk, context) / step_s / bench.fact("flops_per_s")
    text = f"{step_s * 1000:.1f} ms, {sizes.prefill_chunk / step_s:.0f} tokens/s, {share:.0%} of the product rate"
    text += f" ({loaded.facts.attention_backend})"
    figures = {"step_ms": step_s * 1000, "tokens_per_s": sizes.prefill_chunk / step_s, "flop_share": share}
    return Outcome(text, figures)


def num_operations(size: ModelSize, chunk_len: int, context: int) -> int:
    """Of the last `chunk_len` of `context` tokens: two for each weight, and two products with every key that is seen.
    The head runs for one of them."""
    layers, head = num_parameters(size)
    num_pairs = sum(range(context - chunk_len + 1, context + 1))
    return 2 * layers * chunk_len + 2 * head + 4 * size.num_layers * size.num_heads * size.head_size * num_pairs


def load(bench: Bench, size: ModelSize) -> LoadedModel:
    sizes = bench.sizes
    longest, block_size = max(sizes.prefill_contexts), TIMED_BLOCK_SIZE[bench.device]
    config = EngineConfig(
        device=bench.device,
        attention_backend=TIMED_BACKEND[bench.device],
        block_size=block_size,
        max_model_len=longest + 1,
        max_num_batched_tokens=sizes.prefill_chunk,
        num_device_blocks=1 + blocks_for(longest + 1, block_size),
        num_host_blocks=1,
        enforce_eager=True,
    )
    loaded = load_random(size, sizes.dtype, config)
    fill_with_noise(loaded.tensor_pool)
    return loaded
