"""How much memory the cache's pools may take, and the pools themselves; a pool that cannot be had is refused by the
option that asked for it. Knows nothing of weights or of what runs over the pools.
"""

import os
from pathlib import Path
from typing import NoReturn

import torch

from kv_cache.tensor_pool import TensorPool, staging_bytes
from scheduler.outputs import ScheduledChunk, SchedulerOutputs
from worker.attention import BackendType
from worker.attention.backend import AttentionFeatures
from worker.config import DEFAULT_CUDA_GRAPH_BYTES, ConfigError, EngineConfig, ResolvedConfig, blocks_for
from worker.model_runner import ModelRunner, RunnableModel

DEFAULT_CPU_CACHE_BYTES = 2**30
CPU_CACHE_SHARE_OF_MEMORY = 10


def default_cpu_cache_bytes() -> int:
    """The smaller of 1 GiB and a tenth of memory."""
    return min(DEFAULT_CPU_CACHE_BYTES, memory_bytes() // CPU_CACHE_SHARE_OF_MEMORY)


def memory_bytes() -> int:
    """The machine's memory, or the container's limit if that is lower."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        memory = min(memory, int(text))
    return memory


def make_pool(
    model: RunnableModel, resolved: ResolvedConfig, num_device_blocks: int, num_host_blocks: int
) -> TensorPool:
    shape = model.shape
    return TensorPool(
        shape.num_layers,
        num_device_blocks,
        num_host_blocks,
        resolved.block_size,
        shape.num_kv_heads,
        shape.head_size,
        model.dtype,
        model.device,
    )


def check_pool_memory(config: EngineConfig, resolved: ResolvedConfig, block_bytes: int, device: str) -> None:
    """Refuse what can never fit before weights are read: the system may kill a process that fills memory instead of
    refusing it. What a CUDA device holds shows when its pool is made."""
    device_bytes = resolved.num_device_blocks * block_bytes if device == "cpu" else 0
    host_bytes = resolved.num_host_blocks * block_bytes
    memory = memory_bytes()
    if device_bytes > memory:
        raise _pool_error(_pool_option(config), device_bytes, memory, "this machine has")
    if device_bytes + host_bytes > memory:
        raise _pool_error("num_host_blocks", device_bytes + host_bytes, memory, "this machine has")


def refuse_pool(config: EngineConfig, model: RunnableModel, resolved: ResolvedConfig, error: RuntimeError) -> NoReturn:
    shape = model.shape
    block_bytes = TensorPool.block_bytes(
        shape.num_layers, resolved.block_size, shape.num_kv_heads, shape.head_size, model.dtype
    )
    if torch.device(model.device).type == "cuda":
        asked, there = resolved.num_device_blocks * block_bytes, torch.cuda.mem_get_info()[0]
        if asked <= there:
            # The device had room, so what failed is something else: most likely the pinned host pool.
            raise error
        raise _pool_error(_pool_option(config), asked, there, "the device has free") from error
    asked = (resolved.num_device_blocks + resolved.num_host_blocks) * block_bytes
    there = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    raise _pool_error(_pool_option(config), asked, there, "this machine has free") from error


def _pool_option(config: EngineConfig) -> str:
    return "kv_cache_memory" if config.num_device_blocks is None else "num_device_blocks"


def _pool_error(option: str, asked: int, there: int, what: str) -> ConfigError:
    return ConfigError(option, f"the cache's blocks take {asked / 2**30:.1f} GiB, and {what} {there / 2**30:.1f} GiB")


def free_cuda_bytes(
    model: RunnableModel, backend_type: BackendType, resolved: ResolvedConfig, utilization: float
) -> int:
    """Bytes that the cache and what lies beside it may take: this share of the device, less what the weights, the
    largest step and other processes use. Runs a step of the full budget to find out."""
    budget, block_size = resolved.max_num_batched_tokens, resolved.block_size
    longest = min(budget, resolved.max_model_len)
    num_blocks = blocks_for(longest, block_size) + 1
    pool = make_pool(model, resolved, num_blocks, 0)
    runner = ModelRunner(model, pool, backend_type(pool), budget, resolved.max_num_seqs, num_blocks)
    torch.cuda.reset_peak_memory_stats()
    # All rows write into the same blocks: only the sizes matter. One row takes what the others leave of the
    # budget, up to the longest there can be, and as many rows as may run take logits.
    lengths = [1] * (resolved.max_num_seqs - 1)
    lengths.append(min(longest, budget - len(lengths)))
    table = list(range(1, num_blocks))
    chunks = [
        ScheduledChunk("profile", row, 0, [0] * length, table, is_prefill=True, do_sample=True)
        for row, length in enumerate(lengths)
    ]
    runner.execute(SchedulerOutputs(step_id=0, chunks=chunks))
    torch.cuda.synchronize()
    pool_bytes = num_blocks * pool.num_block_bytes
    peak = torch.cuda.max_memory_allocated() - pool_bytes
    del runner, pool
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    used_by_others = total - free - torch.cuda.memory_reserved()
    return max(0, int(total * utilization) - used_by_others - peak)


def max_graph_bytes(config: EngineConfig, features: AttentionFeatures, device: str) -> int:
    """Most device memory that captured decode steps may take; 0: none are captured."""
    if device != "cuda" or config.enforce_eager or not features.cuda_graphs:
        return 0
    return config.cuda_graph_memory or DEFAULT_CUDA_GRAPH_BYTES


def cache_bytes(free_bytes: int, resolved: ResolvedConfig, block_bytes: int, graph_bytes: int) -> int:
    """Of `free_bytes` of a CUDA device, what is left for blocks: less what CUDA graphs may take, and the memory that
    blocks pass through on their way to the host. `resolved` need know no more than whether there is a host pool."""
    return max(0, free_bytes - graph_bytes - staging_bytes(block_bytes, resolved.num_host_blocks))
