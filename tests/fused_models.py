"""Small random models in the shapes of the families that the fused decoders run, and steps through them."""

import random
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from kv_cache.tensor_pool import TensorPool
from scheduler.outputs import ScheduledChunk, SchedulerOutputs
from worker.attention.backend import AttentionBackend
from worker.model_runner import ModelRunner, RunnableModel

VOCAB_SIZE = 300
WINDOW = 24
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def rope(rope_type: str, **values: float) -> dict:
    return {"rope_type": rope_type, "rope_theta": 10000.0, **values}


LLAMA3_ROPE = rope(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)

#: what each family's published checkpoints set, in small
CONFIGURATIONS: dict[str, PretrainedConfig] = {
    "llama_3": LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE),
    "llama_with_biases_and_linear_scaling": LlamaConfig(
        **SIZES, attention_bias=True, mlp_bias=True, rope_parameters=rope("linear", factor=2.0)
    ),
    "smollm": LlamaConfig(**{**SIZES, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144},
                          tie_word_embeddings=True),
    "mistral": MistralConfig(**SIZES, sliding_window=WINDOW, head_dim=32),
    "mistral_without_a_window": MistralConfig(**SIZES, sliding_window=None),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2_5_with_windows": Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**SIZES, head_dim=48, tie_word_embeddings=True),
    "qwen3_with_biases": Qwen3Config(**SIZES, head_dim=16, attention_bias=True),
}  # fmt: skip


def random_prompt(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCAB_SIZE) for _ in range(length)]


class Stepper:
    """Feeds sequences to a model in chunks. Sequence s owns every `num_sequences`-th block, so that none is
    contiguous."""

    def __init__(
        self, model: RunnableModel, backend_type: type[AttentionBackend], prompts: list[list[int]], block_size: int = 16
    ) -> None:
        shape = model.shape
        longest = max(map(len, prompts)) // block_size + 1
        self.pool = TensorPool(
            shape.num_layers,
            1 + longest * len(prompts),
            0,
            block_size,
            shape.num_kv_heads,
            shape.head_size,
            model.dtype,
            "cpu",
        )
        self._prompts = prompts
        num_sequences, num_blocks = len(prompts), longest * len(prompts)
        self._tables = [list(range(1 + number, 1 + num_blocks, num_sequences)) for number in range(num_sequences)]
        self._starts = [0] * len(prompts)
        num_tokens = sum(map(len, prompts))
        self._runner = ModelRunner(model, self.pool, backend_type(self.pool), num_tokens, len(prompts), longest)

    def step(self, sizes: dict[int, int]) -> dict[int, torch.Tensor]:
        """Run the next `sizes[s]` tokens of each sequence s; the logits of the last of them."""
        chunks = []
        for number, size in sizes.items():
            start = self._starts[number]
            token_ids = self._prompts[number][start : start + size]
            assert len(token_ids) == size
            chunks.append(ScheduledChunk("r", number, start, token_ids, self._tables[number], True, True))
            self._starts[number] += size
        logits = self._runner.execute(SchedulerOutputs(0, chunks)).clone()
        return dict(zip(sizes, logits, strict=True))

    def logits_of(self, places: list[int]) -> torch.Tensor:
        """Logits of any tokens of the last step, by their places in it."""
        return self._runner.logits_of(places)


def logits_in_one_go(model: torch.nn.Module, prompt: list[int], places: list[int]) -> list[torch.Tensor]:
    """Transformers' logits of the tokens at `places`, float32."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt]), use_cache=False).logits[0].float()
    return [logits[place] for place in places]


def saved(folder: Path, config: PretrainedConfig, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """A checkpoint of random weights. Norm weights and biases are random too: ones and zeros would hide them."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
            elif name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.3)
    model.to(dtype).save_pretrained(folder)
    return folder
