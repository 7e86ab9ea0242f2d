"""The fused decoders give what Transformers gives, for every family that they take, however the tokens are fed."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen2Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.fused_models import CONFIGURATIONS, SIZES, Stepper, logits_in_one_go, random_prompt, rope, saved
from tests.tiny_models import load_reference
from worker.attention import CpuNativeBackend, TorchSdpaBackend
from worker.fused.family import decoder_shape, unfused_reason
from worker.fused.native_decoder import NativeDecoder, not_native_reason
from worker.fused.rotary import NUM_FIRST_POSITIONS, RotaryTable
from worker.fused.torch_decoder import TorchDecoder
from worker.weights import WeightsError

TOLERANCE = 1e-4
PROMPTS = [random_prompt(length, length) for length in (90, 7, 40)]
#: chunks of three sequences in mixed steps: whole prompts, decodes, chunks that cross blocks and windows
STEPS = [{0: 33, 1: 6}, {0: 1, 1: 1, 2: 20}, {0: 40, 2: 1}, {0: 16, 2: 19}]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Torch's threads wait for each other in busy loops: beside any other load, two are many times slower than one."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def check_steps(stepper: Stepper, reference: torch.nn.Module, tolerance: float) -> None:
    ends = [0] * len(PROMPTS)
    for sizes in STEPS:
        for number, logits in stepper.step(sizes).items():
            ends[number] += sizes[number]
            (want,) = logits_in_one_go(reference, PROMPTS[number], [ends[number] - 1])
            assert logits.dtype == torch.float32
            torch.testing.assert_close(logits, want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("name", "block_size"), [*((name, 16) for name in CONFIGURATIONS), ("smollm", 1), ("mistral", 64), ("qwen3", 3)]
)
def test_the_native_decoder_equals_transformers_in_float32(tmp_path: Path, name: str, block_size: int) -> None:
    folder = saved(tmp_path, CONFIGURATIONS[name])
    decoder = NativeDecoder(folder, CONFIGURATIONS[name], torch.float32)
    check_steps(Stepper(decoder, CpuNativeBackend, PROMPTS, block_size), load_reference(folder), TOLERANCE)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_torch_decoder_equals_transformers_in_float32(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path, CONFIGURATIONS[name])
    decoder = TorchDecoder(folder, CONFIGURATIONS[name], torch.float32)
    check_steps(Stepper(decoder, TorchSdpaBackend, PROMPTS), load_reference(folder), TOLERANCE)


@pytest.mark.parametrize("name", ["llama_3", "smollm", "mistral", "qwen2", "qwen3"])
def test_in_bfloat16_both_decoders_stay_within_its_rounding(tmp_path: Path, name: str) -> None:
    config = CONFIGURATIONS[name]
    folder = saved(tmp_path, config, dtype=torch.bfloat16)
    reference = load_reference(folder)  # the same rounded weights, run in float32
    rounded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager").eval()
    want = logits_in_one_go(reference, PROMPTS[0], [89])[0]
    allowed = 2 * (logits_in_one_go(rounded, PROMPTS[0], [89])[0] - want).square().mean().sqrt()
    for decoder, backend_type in (
        (NativeDecoder(folder, config, torch.bfloat16), CpuNativeBackend),
        (TorchDecoder(folder, config, torch.bfloat16), TorchSdpaBackend),
    ):
        stepper = Stepper(decoder, backend_type, [PROMPTS[0]])
        stepper.step({0: 50})
        error = (stepper.step({0: 40})[0] - want).square().mean().sqrt()
        assert error <= allowed, f"{type(decoder).__name__}: {error} against {allowed}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["smollm", "mistral", "qwen3"])
def test_a_tokens_logits_are_the_same_bit_for_bit_in_any_batch_and_any_chunks(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    config = CONFIGURATIONS[name]
    decoder = NativeDecoder(saved(tmp_path, config), config, dtype)
    alone = Stepper(decoder, CpuNativeBackend, [PROMPTS[0]])
    one_by_one = [alone.step({0: 1})[0] for _ in PROMPTS[0]]
    crowd = [PROMPTS[0], *(random_prompt(90, seed) for seed in range(16))]
    for chunks in ([90], [33, 1, 56], [64, 26], [1, 63, 13, 13]):
        stepper = Stepper(decoder, CpuNativeBackend, crowd, block_size=4)
        end = 0
        for size in chunks:
            mates = {number: (number * 7) % size + 1 for number in range(1, len(crowd), 3)}
            end += size
            assert torch.equal(stepper.step({**mates, 0: size})[0], one_by_one[end - 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["smollm", "mistral", "qwen3"])
def test_decodes_of_a_crowd_whose_heads_are_taken_together_are_bit_for_bit_those_alone(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    config = CONFIGURATIONS[name]
    decoder = NativeDecoder(saved(tmp_path, config), config, dtype)
    crowd = [PROMPTS[0], *(random_prompt(90, seed) for seed in range(7))]
    alone = Stepper(decoder, CpuNativeBackend, [PROMPTS[0]])
    stepper = Stepper(decoder, CpuNativeBackend, crowd)
    # Rows of other lengths beside it: tiles that end, begin and lie past a window in one step.
    stepper.step({number: 9 * number + 1 for number in range(1, len(crowd))} | {0: 60})
    alone.step({0: 60})
    for _ in range(12):
        assert torch.equal(stepper.step(dict.fromkeys(range(len(crowd)), 1))[0], alone.step({0: 1})[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["native", "torch"])
def test_the_head_alone_gives_a_row_the_logits_that_its_step_gives(
    tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    config = CONFIGURATIONS["smollm"]
    folder = saved(tmp_path, config)
    stepper = (
        Stepper(NativeDecoder(folder, config, dtype), CpuNativeBackend, PROMPTS)
        if kind == "native"
        else Stepper(TorchDecoder(folder, config, dtype), TorchSdpaBackend, PROMPTS)
    )
    stepped = stepper.step({0: 40, 1: 7, 2: 1})
    last = stepper.logits_of([39, 46, 47])
    assert torch.equal(last, torch.stack([stepped[0], stepped[1], stepped[2]]))
    if kind == "native":
        assert torch.equal(stepper.logits_of([46]), last[1:2])
        assert torch.equal(stepper.logits_of([*range(48)])[46], last[1])
        with pytest.raises(AssertionError, match="more rows"):
            stepper.logits_of([0] * 49)


def test_results_do_not_depend_on_the_number_of_threads(tmp_path: Path) -> None:
    config = CONFIGURATIONS["qwen3"]
    decoder = NativeDecoder(saved(tmp_path, config), config, torch.float32)
    results = []
    for num_threads in (1, 2, 5):
        torch.set_num_threads(num_threads)
        stepper = Stepper(decoder, CpuNativeBackend, PROMPTS)
        results.append([stepper.step(sizes) for sizes in STEPS])
    for other in results[1:]:
        for step, want in zip(other, results[0], strict=True):
            assert all(torch.equal(step[number], want[number]) for number in want)


def test_every_published_variant_is_fused_and_others_say_why_not() -> None:
    assert [unfused_reason(config) for config in CONFIGURATIONS.values()] == [None] * len(CONFIGURATIONS)
    yarn = rope("yarn", factor=2.0, original_max_position_embeddings=256)
    for config, word in (
        (Gemma3TextConfig(**SIZES), "gemma3_text"),
        (LlamaConfig(**SIZES, hidden_act="gelu"), "gelu"),
        (Qwen2Config(**SIZES, rope_parameters=yarn), "yarn"),
    ):
        assert word in str(unfused_reason(config))
    assert "float16" in str(not_native_reason(CONFIGURATIONS["llama_3"], torch.float16))
    odd = LlamaConfig(**{**SIZES, "hidden_size": 120}, head_dim=20)
    assert unfused_reason(odd) is None
    assert "multiple" in str(not_native_reason(odd, torch.float32))


def test_windows_are_those_of_each_layer() -> None:
    assert decoder_shape(CONFIGURATIONS["qwen2_5_with_windows"]).windows == (None, 24, 24)
    assert decoder_shape(CONFIGURATIONS["mistral"]).windows == (24, 24, 24)
    assert decoder_shape(CONFIGURATIONS["qwen2"]).windows == (None, None, None)


@pytest.mark.parametrize("decoder_type", [NativeDecoder, TorchDecoder])
def test_a_tensor_of_another_shape_is_refused_before_anything_reads_it(tmp_path: Path, decoder_type: type) -> None:
    config = LlamaConfig(**SIZES)
    folder = saved(tmp_path, config)
    wider = LlamaConfig(**{**SIZES, "intermediate_size": 176})
    with pytest.raises(WeightsError, match=r"gate_proj.*\[160, 96\] instead of \[176, 96\]"):
        decoder_type(folder, wider, torch.float32)


def test_a_token_without_an_embedding_never_reaches_the_kernels(tmp_path: Path) -> None:
    config = CONFIGURATIONS["llama_3"]
    decoder = NativeDecoder(saved(tmp_path, config), config, torch.float32)
    stepper = Stepper(decoder, CpuNativeBackend, [[config.vocab_size]])
    with pytest.raises(AssertionError, match="no embedding"):
        stepper.step({0: 1})


def test_a_rotary_table_that_grew_keeps_its_lines_and_holds_what_transformers_computes() -> None:
    config = CONFIGURATIONS["llama_3"]
    table = RotaryTable(config)
    first = table.cosine
    table.reach(3 * NUM_FIRST_POSITIONS + 1)
    assert len(table.cosine) == len(table.sine) == 4 * NUM_FIRST_POSITIONS
    assert torch.equal(table.cosine[: len(first)], first)
    positions = torch.tensor([[0, 1, NUM_FIRST_POSITIONS, 3 * NUM_FIRST_POSITIONS]])
    cosine, sine = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    half = table.cosine.shape[1]
    assert torch.allclose(table.cosine[positions[0]], cosine[0, :, :half], atol=1e-6)
    assert torch.allclose(table.sine[positions[0]], sine[0, :, :half], atol=1e-6)


def test_a_position_beyond_the_table_never_reaches_the_kernels(tmp_path: Path) -> None:
    config = CONFIGURATIONS["llama_3"]
    decoder = NativeDecoder(saved(tmp_path, config), config, torch.float32)
    stepper = Stepper(decoder, CpuNativeBackend, [[3, 4]])
    stepper.step({0: 1})
    token, beyond, row = (torch.tensor([number]) for number in (4, NUM_FIRST_POSITIONS, 0))
    with pytest.raises(AssertionError, match="no angle"):
        decoder.forward(token, beyond, row, stepper._runner._backend)
