"""From options to something that runs: folder, configuration, checks, weights, cache, runner, in that order.

The cheap checks come first: a wrong option or an unsupported model is refused before weights are read.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from kv_cache.tensor_pool import TensorPool
from worker.attention import BackendType
from worker.choices import attention_needs, choose_backend, choose_model, default_block_size
from worker.config import (
    ConfigError,
    EngineConfig,
    ResolvedConfig,
    check_engine_config,
    resolve_engine_config,
)
from worker.decode_graphs import CudaGraphRecorder
from worker.model import shape_from_config
from worker.model_config import load_model_config
from worker.model_runner import ModelRunner, RunnableModel
from worker.model_support import check_model_supported
from worker.pool_memory import (
    cache_bytes,
    check_pool_memory,
    default_cpu_cache_bytes,
    free_cuda_bytes,
    make_pool,
    max_graph_bytes,
    refuse_pool,
)
from worker.weights import check_safetensors, read_json_object, resolve_model

#: Larger than any cache asked for: before the profile step nothing is known of what will be free.
_UNBOUNDED_BYTES = 2**60
#: More threads than this only wait for each other; very many take down the process.
MAX_THREADS_PER_CPU = 4
#: Floating point numbers of one byte are for weights that somebody scales.
_FEWEST_DTYPE_BYTES = 2
_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "do_sample")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the engine tells others of its model. `generation_defaults` are the sampling options that the
    checkpoint's generation_config.json states; empty where it states none. `attention_backend`: the one chosen."""

    folder: Path
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    generation_defaults: dict[str, float | int | bool] = field(default_factory=dict)
    attention_backend: str = ""


@dataclass(slots=True, eq=False)
class LoadedModel:
    runner: ModelRunner
    tensor_pool: TensorPool
    config: ResolvedConfig
    facts: ModelFacts


@dataclass(frozen=True, slots=True)
class _Plan:
    """All that is known before weights are read; every check that needs no weights has passed."""

    folder: Path
    hf_config: PretrainedConfig
    backend_type: BackendType
    device: str
    dtype: torch.dtype
    block_bytes: int
    resolve: Callable[[int], ResolvedConfig]
    notes: tuple[str, ...]


def check_loadable(config: EngineConfig) -> tuple[str, ...]:
    """Whether `load_runner` would take these options and this model: the same checks and errors, no weights read.
    Returns the notes for the operator, as far as they are known without the device."""
    plan = _plan(config)
    return plan.notes + plan.resolve(_first_cache_bytes(plan.device)).notes


def _plan(config: EngineConfig) -> _Plan:
    check_engine_config(config)
    if config.record is not None and not (folder_of_record := Path(config.record).parent).is_dir():
        raise ConfigError("record", f"there is no folder {folder_of_record}")
    max_threads = MAX_THREADS_PER_CPU * (os.cpu_count() or 1)
    if config.num_threads is not None and config.num_threads > max_threads:
        raise ConfigError(
            "num_threads",
            f"{config.num_threads} is over {max_threads}, {MAX_THREADS_PER_CPU} for each of this machine's CPUs",
        )
    device = _choose_device(config.device)
    folder = resolve_model(config.model, config.revision, trust_remote_code=config.trust_remote_code)
    hf_config = load_model_config(folder, trust_remote_code=config.trust_remote_code)
    shape = shape_from_config(hf_config)
    dtype = _choose_dtype(config.dtype, hf_config)
    needs = attention_needs(hf_config, shape.head_size, dtype, device, config.block_size)
    backend_type, notes = choose_backend(config.attention_backend, needs)
    check_model_supported(hf_config, backend_type.features)
    block_size = config.block_size or default_block_size(backend_type)
    block_bytes = TensorPool.block_bytes(shape.num_layers, block_size, shape.num_kv_heads, shape.head_size, dtype)

    def resolve(cache_memory_bytes: int) -> ResolvedConfig:
        return resolve_engine_config(
            config,
            device_type=device,
            block_size=block_size,
            model_max_len=shape.max_position_embeddings,
            block_bytes=block_bytes,
            cache_memory_bytes=cache_memory_bytes,
        )

    resolved = resolve(_first_cache_bytes(device))
    check_pool_memory(config, resolved, block_bytes, device)
    check_safetensors(folder)
    return _Plan(folder, hf_config, backend_type, device, dtype, block_bytes, resolve, notes)


def _first_cache_bytes(device: str) -> int:
    return default_cpu_cache_bytes() if device == "cpu" else _UNBOUNDED_BYTES


def load_runner(config: EngineConfig) -> LoadedModel:
    """Everything below the scheduler, ready to run.

    Raises `ConfigError`, `WeightsError` or `UnsupportedModelError`. On the CPU the cache takes its default share
    of memory; on CUDA what `gpu_memory_utilization` leaves after one step of the full budget was run (that path
    has not been run on a CUDA device yet).
    """
    plan = _plan(config)
    folder, hf_config, backend_type = plan.folder, plan.hf_config, plan.backend_type
    device, dtype, resolve = plan.device, plan.dtype, plan.resolve
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    resolved = resolve(_first_cache_bytes(device))
    graph_bytes = max_graph_bytes(config, backend_type.features, device)
    print(f"loading {config.model} ({dtype}, {device}, attention by {backend_type.name})", file=sys.stderr, flush=True)
    model = choose_model(config, folder, hf_config, dtype, device, backend_type)
    if device == "cuda" and config.num_device_blocks is None and config.kv_cache_memory is None:
        free_bytes = free_cuda_bytes(model, backend_type, resolved, config.gpu_memory_utilization)
        resolved = resolve(cache_bytes(free_bytes, resolved, plan.block_bytes, graph_bytes))
    for note in plan.notes + resolved.notes:
        print(note, file=sys.stderr, flush=True)
    try:
        tensor_pool = make_pool(model, resolved, resolved.num_device_blocks, resolved.num_host_blocks)
    except RuntimeError as error:
        refuse_pool(config, model, resolved, error)
    runner = make_runner(model, tensor_pool, backend_type, resolved)
    if graph_bytes:
        print(runner.capture_decode_steps(graph_bytes, CudaGraphRecorder()).note(), file=sys.stderr, flush=True)
    facts = ModelFacts(
        folder=folder,
        vocab_size=model.vocab_size,
        eos_token_ids=_eos_token_ids(folder, hf_config),
        max_model_len=resolved.max_model_len,
        generation_defaults=_generation_defaults(folder),
        attention_backend=backend_type.name,
    )
    return LoadedModel(runner, tensor_pool, resolved, facts)


def make_runner(
    model: RunnableModel, tensor_pool: TensorPool, backend_type: BackendType, resolved: ResolvedConfig
) -> ModelRunner:
    return ModelRunner(
        model,
        tensor_pool,
        backend_type(tensor_pool),
        resolved.max_num_batched_tokens,
        resolved.max_num_seqs,
        resolved.max_blocks_per_sequence,
        num_steps_in_flight=2 if resolved.async_scheduling else 1,
    )


def _choose_device(device: str) -> str:
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", "cuda was asked for, and PyTorch finds no CUDA device")
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _choose_dtype(name: str, hf_config: PretrainedConfig) -> torch.dtype:
    if name == "auto":
        dtype = getattr(hf_config, "dtype", None) or torch.float32
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < _FEWEST_DTYPE_BYTES:
            raise ConfigError("dtype", f"the checkpoint's, {dtype}, is not one to compute in: choose another")
        return dtype
    return getattr(torch, name)


def _read_json(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _eos_token_ids(folder: Path, hf_config: PretrainedConfig) -> tuple[int, ...]:
    """Ids that end an answer: those of generation_config.json, or else of the model's configuration."""
    ids = _read_json(folder / "generation_config.json").get("eos_token_id")
    if ids is None:
        ids = getattr(hf_config, "eos_token_id", None)
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (ids,)


def _generation_defaults(folder: Path) -> dict[str, float | int | bool]:
    stated = _read_json(folder / "generation_config.json")
    return {name: stated[name] for name in _SAMPLING_DEFAULTS if stated.get(name) is not None}
