"""Llamas with random weights, made on the device itself, in runners and engines: no checkpoint is written or read."""

import gc
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig

from kv_cache.tensor_pool import TensorPool
from tests.gpu.backends import backend_class
from tests.gpu.sizes import ModelSize
from worker.attention.backend import AttentionFeatures
from worker.config import EngineConfig, resolve_engine_config
from worker.engine import Engine
from worker.loading import LoadedModel, ModelFacts
from worker.model import ATTENTION_NAME, CausalModel, paged_attention
from worker.model_runner import ModelRunner
from worker.pool_memory import make_pool

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


def random_model(size: ModelSize, dtype: torch.dtype, device: str, features: AttentionFeatures) -> CausalModel:
    """The same weights each time."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(llama_config(size), dtype=dtype, attn_implementation=ATTENTION_NAME)
    return CausalModel(model.eval(), features)


def load_random(size: ModelSize, dtype: torch.dtype, config: EngineConfig) -> LoadedModel:
    """As `worker.loading.load_runner` has it, for a `config` that names a device and a number of blocks."""
    device, block_size = config.device, config.block_size
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
    runner = ModelRunner(
        model,
        pool,
        backend_type(pool),
        resolved.max_num_batched_tokens,
        resolved.max_num_seqs,
        resolved.max_blocks_per_sequence,
    )
    facts = ModelFacts(
        Path(size.name), model.vocab_size, (), resolved.max_model_len, attention_backend=backend_type.name
    )
    return LoadedModel(runner, pool, resolved, facts)


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
