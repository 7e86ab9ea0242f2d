"""A configuration is run as Transformers runs it, or refused by name; it never ends in a traceback."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config, SmolLM3Config

from tests.fused_models import SIZES, Stepper, logits_in_one_go, random_prompt, saved
from tests.tiny_models import load_reference
from worker.config import ConfigError, EngineConfig
from worker.fused.family import unfused_reason
from worker.loading import check_loadable, load_runner
from worker.model_runner import ModelRunner
from worker.model_support import UnsupportedModelError
from worker.weights import WeightsError

PROMPT = random_prompt(60, 1)
BACKENDS = ("auto", "torch_sdpa")
CONFIGURATIONS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "mistral": MistralConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "smollm3": SmolLM3Config(**SIZES, no_rope_layers=[1, 0, 1]),
}
#: in place of a field: it is taken out
ABSENT = object()
SLIDING = "sliding_attention"
WINDOW_OF_NOTHING = {"use_sliding_window": True, "sliding_window": 0}
MIXED_LAYERS = [SLIDING, "full_attention", SLIDING]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {family: saved(root / family, config) for family, config in CONFIGURATIONS.items()}


def edited(source: Path, folder: Path, changes: dict[str, object]) -> Path:
    """The checkpoint with other lines in its config.json."""
    config = json.loads((source / "config.json").read_text()) | changes
    config = {name: value for name, value in config.items() if value is not ABSENT}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").symlink_to(source / "model.safetensors")
    return folder


def options(folder: Path, backend: str, dtype: str = "float32") -> EngineConfig:
    return EngineConfig(model=str(folder), device="cpu", dtype=dtype, attention_backend=backend, max_model_len=64,
                        num_device_blocks=9)  # fmt: skip


def last_logits(runner: ModelRunner, prompt: list[int]) -> torch.Tensor:
    return Stepper(runner._model, type(runner._backend), [prompt]).step({0: len(prompt)})[0]


def rope(**values: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_theta": 10000.0, **values}}


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("llama", {"num_hidden_layers": 0}, "its num_hidden_layers is 0"),
        ("llama", {"num_hidden_layers": -1}, "its num_hidden_layers is -1"),
        ("llama", {"num_hidden_layers": "3"}, r"config\.json cannot be used.*num_hidden_layers"),
        ("llama", {"num_hidden_layers": None}, r"config\.json cannot be used.*num_hidden_layers"),
        ("llama", {"num_attention_heads": 0}, r"config\.json cannot be used"),
        ("llama", {"num_key_value_heads": 0}, "its num_key_value_heads is 0"),
        ("llama", {"num_key_value_heads": 4}, "6 query heads cannot share 4"),
        ("llama", {"hidden_size": 0}, "its hidden_size is 0"),
        ("llama", {"hidden_size": 97}, r"config\.json cannot be used.*97"),
        ("llama", {"vocab_size": 0}, "its vocab_size is 0"),
        ("llama", {"max_position_embeddings": 0}, "its max_position_embeddings is 0"),
        ("qwen2", {"num_attention_heads": 192}, "hidden_size of 96 is below its 192 heads"),
        ("qwen2", {"hidden_size": 90}, "heads of 15 have no halves"),
        ("llama", {"head_dim": 3}, "heads of 3 have no halves"),
        ("llama", {"head_dim": 15}, r"config\.json cannot be used.*15"),
        ("qwen3", {"head_dim": 0}, "its head_dim is 0"),
        ("llama", {"hidden_act": "foo"}, "activation 'foo'"),
        ("llama", {"rms_norm_eps": "small"}, r"config\.json cannot be used.*rms_norm_eps"),
        ("llama", {"rope_parameters": ABSENT, "rope_scaling": {"type": "foo"}}, "position scaling 'foo'"),
        ("qwen2", {"rope_parameters": ABSENT, "rope_scaling": {"rope_type": "foo"}}, "position scaling 'foo'"),
        ("llama", rope(rope_type="llama3"), r"config\.json cannot be used.*factor"),
        ("llama", rope(rope_type="linear", factor=0), "factor of its position scaling is 0"),
        ("llama", rope(rope_type="linear", factor="2"), "factor of its position scaling is '2'"),
        ("llama", rope(rope_type="default", rope_theta=0), "rope_theta of its position scaling is 0"),
        ("mistral", {"sliding_window": 0}, "its sliding_window is 0"),
        ("mistral", {"sliding_window": -1}, "its sliding_window is -1"),
        ("qwen2", {"layer_types": MIXED_LAYERS, **WINDOW_OF_NOTHING}, "sliding_window is 0"),
        ("qwen2", {"layer_types": MIXED_LAYERS, "sliding_window": None}, "sliding_attention and no sliding_window"),
        ("qwen3", {"layer_types": MIXED_LAYERS, "sliding_window": 8}, "sliding_attention and no sliding_window"),
        ("smollm3", {"layer_types": MIXED_LAYERS}, "sliding_attention and no sliding_window"),
        ("qwen2", {"layer_types": ["full_attention"]}, r"config\.json cannot be used.*layer_types"),
        ("llama", {"per_layer_config": {"1": {"skip": ["mlp"]}}}, "differ in their configuration"),
        ("llama", {"dtype": "foo"}, r"config\.json cannot be used.*foo"),
    ],
)
def test_a_model_that_cannot_be_is_refused_by_name_before_weights_are_read(
    checkpoints: dict[str, Path], tmp_path: Path, family: str, changes: dict[str, object], words: str
) -> None:
    folder = edited(checkpoints[family], tmp_path, changes)
    for backend in BACKENDS:
        with pytest.raises(UnsupportedModelError, match=words) as caught:
            check_loadable(options(folder, backend))
        assert "\n" not in str(caught.value)
        assert caught.value.architecture == type(CONFIGURATIONS[family]).__name__.replace("Config", "ForCausalLM")


@pytest.mark.parametrize("changes", [{"model_type": ["llama"]}, {"architectures": "Llama"}, {"architectures": [3]}])
def test_names_that_are_none_are_refused_with_the_file(
    checkpoints: dict[str, Path], tmp_path: Path, changes: dict[str, object]
) -> None:
    with pytest.raises(WeightsError, match=f"config.json: {next(iter(changes))} is no"):
        check_loadable(options(edited(checkpoints["llama"], tmp_path, changes), "auto"))


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_a_checkpoints_dtype_that_nothing_computes_in_is_refused(
    checkpoints: dict[str, Path], tmp_path: Path, dtype: str
) -> None:
    folder = edited(checkpoints["llama"], tmp_path, {"dtype": dtype})
    with pytest.raises(ConfigError, match=f"^dtype: .*{dtype}"):
        check_loadable(options(folder, "auto", dtype="auto"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("changes", "tensor"),
    [({"vocab_size": 200}, r"(embed_tokens|lm_head)\.weight is \[300, 96\] instead of \[200, 96\]"),
     ({"intermediate_size": 176}, r"\[(160, 96|96, 160)\] instead of \[(176, 96|96, 176)\]")],
)  # fmt: skip
def test_tensors_of_another_size_than_the_configuration_states_are_refused_with_both(
    checkpoints: dict[str, Path], tmp_path: Path, backend: str, changes: dict[str, object], tensor: str
) -> None:
    with pytest.raises(WeightsError, match=tensor) as caught:
        load_runner(options(edited(checkpoints["llama"], tmp_path, changes), backend))
    assert "\n" not in str(caught.value)


def test_what_only_building_the_model_shows_is_refused_by_name(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    folder = edited(checkpoints["qwen2"], tmp_path, {"head_dim": None})
    with pytest.raises(UnsupportedModelError, match=r"Qwen2ForCausalLM.*cannot build it \(TypeError"):
        load_runner(options(folder, "torch_sdpa"))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"sliding_window": 8}),
        ("llama", {"sliding_window": 0}),
        ("llama", {"layer_types": [SLIDING] * 3, "sliding_window": 8}),
        ("llama", {"attention_dropout": 0.5, "pretraining_tp": 2, "final_logit_softcapping": 1.0, "logit_scale": 9.0}),
        ("llama", {"no_rope_layers": [0, 0, 0]}),
        ("mistral", {"sliding_window": 8}),
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 8, "layer_types": MIXED_LAYERS}),
        ("mistral", {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", {"sliding_window": 8, "layer_types": MIXED_LAYERS, "use_sliding_window": True}),
        ("qwen2", {"sliding_window": 8, "layer_types": ABSENT, "use_sliding_window": False, "max_window_layers": 0}),
        ("qwen2", {"sliding_window": 0, "layer_types": ABSENT, "use_sliding_window": True, "max_window_layers": 3}),
        ("qwen2", {"attention_bias": False, "mlp_bias": True}),
        ("qwen3", {"sliding_window": 8, "layer_types": MIXED_LAYERS, "use_sliding_window": True}),
        ("smollm3", {}),
        ("smollm3", {"no_rope_layers": [0, 1, 0]}),
        ("smollm3", {"no_rope_layers": ABSENT, "no_rope_layer_interval": 2}),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 8, "layer_types": ABSENT}),
        ("llama", {"rope_parameters": ABSENT, "rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 3.0}}),
        ("qwen3", rope(rope_type="default", attention_factor=2.0, factor=5.0)),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    ],
)
def test_a_field_means_what_it_means_to_transformers_whether_its_family_knows_it_or_not(
    checkpoints: dict[str, Path], tmp_path: Path, family: str, changes: dict[str, object]
) -> None:
    folder = edited(checkpoints[family], tmp_path, changes)
    logits = last_logits(load_runner(options(folder, "auto")).runner, PROMPT)
    (want,) = logits_in_one_go(load_reference(folder), PROMPT, [len(PROMPT) - 1])
    torch.testing.assert_close(logits, want, atol=1e-4, rtol=1e-4)


def test_what_a_family_runs_is_left_to_transformers_where_layers_differ_or_see_nothing() -> None:
    assert "sliding_window" in str(unfused_reason(MistralConfig(**SIZES, sliding_window=0)))
    assert "differ" in str(unfused_reason(LlamaConfig(**SIZES, per_layer_config={1: {"skip": ["mlp"]}})))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["model.norm.weight", "model.embed_tokens.weight"])
def test_a_model_whose_weights_are_not_numbers_loads_and_computes_none(
    checkpoints: dict[str, Path], tmp_path: Path, backend: str, name: str
) -> None:
    """Its requests are told so, one by one."""
    source = checkpoints["llama"]
    tensors = load_file(source / "model.safetensors")
    tensors[name] = tensors[name] * float("nan")
    folder = edited(source, tmp_path, {})
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert last_logits(load_runner(options(folder, backend)).runner, PROMPT).isnan().all()
