"""How large everything is: on a GPU, and in the dry run on a CPU, which runs the same code in less than a minute."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A Llama with random weights. `name` is what the table calls it."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    is_tied: bool

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads


LLAMA_TINY = ModelSize("tiny", 64, 128, 2, 4, 2, 512, False)
LLAMA_1B = ModelSize("1B", 2048, 8192, 16, 32, 8, 128256, True)
LLAMA_8B = ModelSize("8B", 4096, 14336, 32, 32, 8, 128256, False)


@dataclass(frozen=True, slots=True)
class AttentionMix:
    """`heads`: of queries, of keys."""

    head_size: int
    heads: tuple[int, int]
    window: int | None
    softcap: float | None


@dataclass(frozen=True, slots=True)
class LongPromptSizes:
    """`num_answers` are streaming, each after `prompt_len` tokens, when a prompt of `long_len` comes; `budget` is that
    of the chunked policy. `num_steps_before` and `_after`: steps of which the gaps are counted around the prompt."""

    num_answers: int
    prompt_len: int
    long_len: int
    budget: int
    num_steps_before: int
    num_steps_after: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """`dtype` is that of the models whose steps are timed. `engine_backends` empty: all of them."""

    device: str
    dtype: torch.dtype
    attention_dtypes: tuple[torch.dtype, ...]
    attention_mixes: tuple[AttentionMix, ...]
    attention_rows: int
    attention_context: int
    engine_backends: tuple[str, ...]
    copy_bytes: int
    matmul_size: int
    num_repeats: int
    models: tuple[ModelSize, ...]
    overlap_model: ModelSize
    overlap_batch: int
    overlap_tokens: int
    decode_batches: tuple[int, ...]
    decode_context: int
    prefill_chunk: int
    prefill_contexts: tuple[int, ...]
    sampler_vocab: int
    swap_bytes: int
    long_prompt_model: ModelSize
    long_prompt: LongPromptSizes

    @property
    def is_dry_run(self) -> bool:
        return self.device == "cpu"


ON_GPU = Sizes(
    device="cuda",
    dtype=torch.bfloat16,
    attention_dtypes=(torch.float32, torch.float16, torch.bfloat16),
    # Each is compiled for itself, once for every dtype and block size.
    attention_mixes=(
        AttentionMix(64, (8, 8), None, None),
        AttentionMix(128, (8, 2), 200, None),
        AttentionMix(128, (8, 1), 200, 30.0),
    ),
    attention_rows=24,
    attention_context=2000,
    engine_backends=(),
    copy_bytes=4 * 2**30,
    matmul_size=8192,
    num_repeats=20,
    models=(LLAMA_1B, LLAMA_8B),
    overlap_model=LLAMA_1B,
    overlap_batch=64,
    overlap_tokens=128,
    decode_batches=(1, 32, 256),
    decode_context=512,
    prefill_chunk=2048,
    prefill_contexts=(2048, 16384),
    sampler_vocab=128256,
    swap_bytes=2**30,
    long_prompt_model=LLAMA_1B,
    long_prompt=LongPromptSizes(64, 128, 32768, 2048, 40, 20),
)

DRY_RUN = Sizes(
    device="cpu",
    dtype=torch.float32,
    # Triton's interpreter multiplies bfloat16 wrongly.
    attention_dtypes=(torch.float32, torch.float16),
    attention_mixes=(
        AttentionMix(64, (4, 2), None, None),
        AttentionMix(64, (4, 4), 20, None),
        AttentionMix(64, (4, 1), 20, 30.0),
    ),
    attention_rows=4,
    attention_context=70,
    engine_backends=("torch_sdpa",),
    copy_bytes=2**22,
    matmul_size=256,
    num_repeats=2,
    models=(LLAMA_TINY,),
    overlap_model=LLAMA_TINY,
    overlap_batch=8,
    overlap_tokens=12,
    decode_batches=(1, 4),
    decode_context=40,
    prefill_chunk=64,
    prefill_contexts=(64, 256),
    sampler_vocab=1000,
    swap_bytes=2**20,
    long_prompt_model=LLAMA_TINY,
    long_prompt=LongPromptSizes(6, 8, 512, 64, 8, 4),
)
