"""Llamas with random weights, made on the device itself, in runners and engines: no checkpoint is read."""

import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from kv_cache.tensor_pool import TensorPool
from tests.gpu.backends import backend_class
from tests.gpu.sizes import ModelSize
from worker.attention.backend import AttentionBackend, AttentionFeatures
from worker.config import EngineConfig, ResolvedConfig, resolve_engine_config
from worker.decode_graphs import CudaGraphRecorder
from worker.engine import Engine
from worker.loading import LoadedModel, ModelFacts, make_runner
from worker.model import ATTENTION_NAME, CausalModel, paged_attention
from worker.model_runner import ModelRunner
from worker.pool_memory import make_pool, max_graph_bytes

#: positions that the models have, more than any part needs
MAX_POSITIONS = 131072


def llama_config(size: ModelSize) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=size.vocab_size,
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_kv_heads,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=size.is_tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


def random_weights(size: ModelSize, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """The same each time."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(llama_config(size), dtype=dtype, attn_implementation=ATTENTION_NAME)


def random_model(size: ModelSize, dtype: torch.dtype, device: str, features: AttentionFeatures) -> CausalModel:
    return CausalModel(random_weights(size, dtype, device).eval(), features)


@dataclass(slots=True, eq=False)
class Parts:
    """What a runner is made of."""

    model: CausalModel
    pool: TensorPool
    backend_type: type[AttentionBackend]
    config: ResolvedConfig

    def runner(self) -> ModelRunner:
        return make_runner(self.model, self.pool, self.backend_type, self.config)


def load_parts(
    size: ModelSize, dtype: torch.dtype, config: EngineConfig, backend_type: type[AttentionBackend] | None = None
) -> Parts:
    """For a `config` that names a device, a block size and a number of blocks; its backend unless another is given."""
    device, block_size = config.device, config.block_size
    if backend_type is None:
        backend_type = backend_class(config.attention_backend, device, dtype, size.head_size, block_size)
    resolved = resolve_engine_config(
        config,
        device_type=device,
        block_size=block_size,
        model_max_len=MAX_POSITIONS,
        block_bytes=block_size * cache_bytes_per_token(size, dtype),
        cache_memory_bytes=0,
    )
    model = random_model(size, dtype, device, backend_type.features)
    pool = make_pool(model, resolved, resolved.num_device_blocks, resolved.num_host_blocks)
    return Parts(model, pool, backend_type, resolved)


def load_random(size: ModelSize, dtype: torch.dtype, config: EngineConfig) -> LoadedModel:
    """As `worker.loading.load_runner` has it, decode steps captured where it captures them."""
    parts = load_parts(size, dtype, config)
    runner = parts.runner()
    if graph_bytes := max_graph_bytes(config, parts.backend_type.features, config.device):
        print(runner.capture_decode_steps(graph_bytes, CudaGraphRecorder()).note(), file=sys.stderr, flush=True)
    facts = ModelFacts(
        Path(size.name),
        parts.model.vocab_size,
        (),
        parts.config.max_model_len,
        attention_backend=parts.backend_type.name,
    )
    return LoadedModel(runner, parts.pool, parts.config, facts)


class RandomEngine(Engine):
    def __init__(self, size: ModelSize, dtype: torch.dtype, config: EngineConfig) -> None:
        self._wire(load_random(size, dtype, config), time.monotonic)


def weight_bytes(size: ModelSize, dtype: torch.dtype) -> int:
    """Those that a step reads: of an embedding that is not the head too it reads a few rows."""
    return sum(num_parameters(size)) * dtype.itemsize


def num_parameters(size: ModelSize) -> tuple[int, int]:
    """(those of the layers, with which each token is multiplied; those of the head)."""
    attention = size.hidden_size * size.head_size * 2 * (size.num_heads + size.num_kv_heads)
    feed_forward = 3 * size.hidden_size * size.intermediate_size
    return size.num_layers * (attention + feed_forward), size.hidden_size * size.vocab_size


def cache_bytes_per_token(size: ModelSize, dtype: torch.dtype) -> int:
    return TensorPool.block_bytes(size.num_layers, 1, size.num_kv_heads, size.head_size, dtype)


def fill_with_noise(pool: TensorPool) -> None:
    """Zeros are read faster than numbers; the null block stays as it is."""
    for layer in range(pool.num_layers):
        for cache in pool.key_value(layer):
            cache[1:].normal_()


class OneAtATime:
    """Keeps the last model that was loaded, and lets it go before the next one is."""

    def __init__(self) -> None:
        self._key: object = None
        self._loaded: LoadedModel | None = None

    def get(self, key: object, load: Callable[[], LoadedModel]) -> LoadedModel:
        if self._loaded is None or key != self._key:
            self._loaded = None
            gc.collect()  # a model and its hook hold each other
            self._key, self._loaded = key, load()
        return self._loaded
