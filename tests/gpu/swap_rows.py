"""Blocks between device and host against a plain copy of as many bytes through pinned memory."""

import time

import torch

from kv_cache.tensor_pool import TensorPool
from tests.gpu.parts import Bench, Case
from tests.gpu.report import Outcome, judged
from tests.gpu.timing import wait_for, wall_s
from worker.rates import measure_swap_rates

GIGA = 10**9
#: the cache of a 1B Llama
NUM_LAYERS, NUM_KV_HEADS, HEAD_SIZE = 16, 8, 64
BLOCK_SIZES = (16, 256)


def cases(bench: Bench) -> list[Case]:
    return [
        Case(f"blocks of {block_size}", lambda block_size=block_size: swap_rates(bench, block_size))
        for block_size in BLOCK_SIZES
    ]


def swap_rates(bench: Bench, block_size: int) -> Outcome:
    """Fails where a block comes back with other bytes than it left with."""
    sizes, device = bench.sizes, bench.device
    block_bytes = TensorPool.block_bytes(NUM_LAYERS, block_size, NUM_KV_HEADS, HEAD_SIZE, sizes.dtype)
    count = max(2, sizes.swap_bytes // block_bytes)
    pool = TensorPool(NUM_LAYERS, 2 * count + 1, count, block_size, NUM_KV_HEADS, HEAD_SIZE, sizes.dtype, device)
    for layer in range(NUM_LAYERS):
        for cache in pool.key_value(layer):
            cache[1:].normal_()
    device_ids = (torch.randperm(2 * count) + 1).tolist()
    out_pairs = list(zip(device_ids[:count], torch.randperm(count).tolist(), strict=True))
    in_pairs = [(host, into) for (_, host), into in zip(out_pairs, device_ids[count:], strict=True)]
    out_s = wall_s(lambda: pool.swap(out_pairs, [], []), device, sizes.num_repeats)
    in_s = wall_s(lambda: pool.swap([], in_pairs, []), device, sizes.num_repeats)
    wait_for(device)
    is_whole = all(
        torch.equal(cache[device_ids[:count]], cache[device_ids[count:]])
        for layer in range(NUM_LAYERS)
        for cache in pool.key_value(layer)
    )
    num_bytes = count * block_bytes
    down_s, up_s = _link_s(num_bytes, device, sizes.num_repeats)
    believed = measure_swap_rates(pool, time.perf_counter)
    text = (  # what an engine measures at its start is told beside it
        f"out {num_bytes / out_s / GIGA:.1f} GB/s ({down_s / out_s:.0%} of the link), "
        f"in {num_bytes / in_s / GIGA:.1f} GB/s ({up_s / in_s:.0%}); {believed.note(block_bytes)}"
        f"{'' if is_whole else '; blocks came back changed'}"
    )
    figures = {
        "out_bytes_per_s": num_bytes / out_s,
        "in_bytes_per_s": num_bytes / in_s,
        "out_share": down_s / out_s,
        "in_share": up_s / in_s,
    }
    return judged(is_whole, text, figures)


def _link_s(num_bytes: int, device: str, num_repeats: int) -> tuple[float, float]:
    """Seconds of one plain copy from the device, and of one to it."""
    there = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    here = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device == "cuda")
    down_s = wall_s(lambda: here.copy_(there, non_blocking=True), device, num_repeats)
    up_s = wall_s(lambda: there.copy_(here, non_blocking=True), device, num_repeats)
    return down_s, up_s
