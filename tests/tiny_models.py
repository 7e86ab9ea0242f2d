"""Small random checkpoints of several families, for tests that need a real model and no download."""

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

VOCAB_SIZE = 512
SLIDING_WINDOW = 64
_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def tiny_config(family: str) -> PretrainedConfig:
    """The configuration of a tiny model: `llama`, `qwen2`, `qwen3`, `mistral` (window 64) or `gpt_neox`."""
    if family == "llama":
        return LlamaConfig(**_COMMON, num_key_value_heads=2)
    if family == "qwen2":
        return Qwen2Config(**_COMMON, num_key_value_heads=2)
    if family == "qwen3":
        return Qwen3Config(**_COMMON, num_key_value_heads=1, head_dim=32)
    if family == "mistral":
        return MistralConfig(**_COMMON, num_key_value_heads=2, sliding_window=SLIDING_WINDOW)
    if family == "gpt_neox":
        return GPTNeoXConfig(**_COMMON)
    raise ValueError(f"there is no tiny model of the family {family}")


FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gpt_neox")


def save_tiny_model(folder: Path, family: str, *, config: PretrainedConfig | None = None, seed: int = 0) -> Path:
    """Write a float32 checkpoint (config, generation config, safetensors; no tokenizer) and return its folder."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config or tiny_config(family), dtype=torch.float32)
    model.save_pretrained(folder)
    return folder


def load_reference(folder: Path) -> torch.nn.Module:
    """The same checkpoint as Transformers runs it by itself: eager attention, float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
