"""Decode steps of random Llamas against the time in which their bytes, weights and cache, can be read."""

from tests.gpu.backends import TIMED_BACKEND, TIMED_BLOCK_SIZE
from tests.gpu.models import OneAtATime, cache_bytes_per_token, fill_with_noise, load_random, weight_bytes
from tests.gpu.parts import Bench, Case
from tests.gpu.report import Outcome, Verdict
from tests.gpu.sizes import ModelSize
from tests.gpu.steps import blocks_for, decode_step
from tests.gpu.timing import wall_s
from worker.config import EngineConfig
from worker.loading import LoadedModel


def cases(bench: Bench) -> list[Case]:
    models = OneAtATime()
    return [
        Case(
            f"{size.name} batch {batch} context {bench.sizes.decode_context}",
            lambda size=size, batch=batch: time_step(bench, models, size, batch),
        )
        for size in bench.sizes.models
        for batch in bench.sizes.decode_batches
    ]


def time_step(bench: Bench, models: OneAtATime, size: ModelSize, batch: int) -> Outcome:
    sizes = bench.sizes
    weights = weight_bytes(size, sizes.dtype)
    cache = sizes.decode_context * cache_bytes_per_token(size, sizes.dtype)
    if not bench.has_memory_for(weights + max(sizes.decode_batches) * cache):
        return Outcome("the device has not the memory for it", verdict=Verdict.LEFT_OUT)
    loaded = models.get(size, lambda: load(bench, size))
    step = decode_step([sizes.decode_context] * batch, loaded.config.block_size)
    step_s = wall_s(lambda: loaded.runner.execute(step), bench.device, sizes.num_repeats)
    bound_s = (weights + batch * cache) / bench.fact("read_bytes_per_s")
    text = (
        f"{step_s * 1000:.2f} ms, its bytes {bound_s * 1000:.2f} ms: {step_s / bound_s:.2f} times; "
        f"{batch / step_s:.0f} tokens/s ({loaded.facts.attention_backend})"
    )
    figures = {"step_ms": step_s * 1000, "bound_ms": bound_s * 1000, "ratio": step_s / bound_s}
    return Outcome(text, {**figures, "backend": loaded.facts.attention_backend})


def load(bench: Bench, size: ModelSize) -> LoadedModel:
    """With room for the largest batch, every slot of it written."""
    sizes = bench.sizes
    batch, block_size = max(sizes.decode_batches), TIMED_BLOCK_SIZE[bench.device]
    config = EngineConfig(
        device=bench.device,
        attention_backend=TIMED_BACKEND[bench.device],
        block_size=block_size,
        max_model_len=sizes.decode_context + 1,
        max_num_batched_tokens=batch,
        max_num_seqs=batch,
        num_device_blocks=1 + batch * blocks_for(sizes.decode_context + 1, block_size),
        num_host_blocks=1,
    )
    loaded = load_random(size, sizes.dtype, config)
    fill_with_noise(loaded.tensor_pool)
    return loaded
