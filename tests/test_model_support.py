import pytest
import transformers
from transformers import CONFIG_MAPPING, PretrainedConfig

from tests.tiny_models import FAMILIES, tiny_config
from worker.attention import AttentionFeatures, TorchSdpaBackend
from worker.model_support import UnsupportedModelError, check_model_supported, check_remote_code

FEATURES = TorchSdpaBackend.features
EVERYTHING = AttentionFeatures(sliding_window=True, softcap=True, sinks=True)
NOTHING = AttentionFeatures(sliding_window=False, softcap=False, sinks=False)


def llama(**options: object) -> PretrainedConfig:
    config = tiny_config("llama")
    config.architectures = ["LlamaForCausalLM"]
    for name, value in options.items():
        setattr(config, name, value)
    return config


def of_type(name: str, **options: object) -> PretrainedConfig:
    return getattr(transformers, name)(**options)


@pytest.mark.parametrize("family", FAMILIES)
def test_decoders_with_ordinary_attention_are_supported(family: str) -> None:
    check_model_supported(tiny_config(family), FEATURES)


@pytest.mark.parametrize(
    "name",
    ["GPT2Config", "OPTConfig", "GemmaConfig", "Gemma3TextConfig", "CohereConfig", "GraniteConfig", "MixtralConfig"],
)
def test_other_families_are_supported_without_being_listed(name: str) -> None:
    check_model_supported(of_type(name), FEATURES)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (lambda: of_type("T5Config"), "encoder-decoder"),
        (lambda: of_type("BartConfig"), "encoder-decoder"),
        (lambda: of_type("MambaConfig"), "state-space or hybrid"),
        (lambda: of_type("RwkvConfig"), "state-space or hybrid"),
        (lambda: of_type("JambaConfig"), "state-space or hybrid"),
        (lambda: of_type("FalconH1Config"), "state-space or hybrid"),
        (lambda: llama(layer_types=["full_attention", "linear_attention", "full_attention"]), "linear_attention"),
        (lambda: of_type("LlavaConfig"), "multimodal"),
        (lambda: of_type("Gemma3Config"), "multimodal"),
        (lambda: of_type("Qwen2AudioConfig"), "multimodal"),
        (lambda: llama(quantization_config={"quant_method": "gptq", "bits": 4}), "quantized .gptq"),
        (lambda: of_type("BertConfig"), "encoder"),
        (lambda: of_type("RobertaConfig", architectures=["RobertaModel"]), "not a causal language model"),
        (lambda: llama(architectures=["LlamaForSequenceClassification"]), "not a causal language model"),
        (lambda: llama(use_bidirectional_attention=True), "both ways"),
        (lambda: of_type("BloomConfig"), "does not use the attention interface"),
        (lambda: of_type("FalconConfig"), "does not use the attention interface"),
        (lambda: of_type("CLIPTextConfig"), "no causal language model"),
        (lambda: of_type("Gemma2Config"), "softcapping"),
        (lambda: of_type("GptOssConfig"), "sinks"),
        (lambda: of_type("Llama4TextConfig"), "chunked_attention"),
        (lambda: llama(attention_chunk_size=512), "chunked"),
        (lambda: of_type("DeepseekV3Config"), "latent attention"),
        (lambda: llama(num_kv_shared_layers=2), "share keys"),
        (lambda: llama(alibi=True), "ALiBi"),
    ],
    ids=lambda value: None if callable(value) else value,
)
def test_what_cannot_work_is_refused_by_name(config: object, reason: str) -> None:
    refused = config()
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        check_model_supported(refused, FEATURES)
    name = refused.architectures[0] if refused.architectures else refused.model_type
    assert caught.value.architecture == name
    assert name in str(caught.value)


@pytest.mark.parametrize("scaling", ["dynamic", "longrope"])
def test_position_scaling_by_the_longest_sequence_of_a_batch_is_refused(scaling: str) -> None:
    with pytest.raises(UnsupportedModelError, match=scaling):
        check_model_supported(llama(rope_parameters={"rope_type": scaling, "rope_theta": 1e4, "factor": 2.0}), FEATURES)
    per_layer = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": scaling}}
    with pytest.raises(UnsupportedModelError, match=scaling):
        check_model_supported(llama(rope_parameters=per_layer), FEATURES)


@pytest.mark.parametrize("scaling", ["default", "linear", "llama3", "yarn"])
def test_position_scaling_that_is_fixed_at_start_is_supported(scaling: str) -> None:
    check_model_supported(llama(rope_parameters={"rope_type": scaling, "rope_theta": 1e4}), FEATURES)


def test_a_backend_that_implements_a_feature_gets_the_models_that_need_it() -> None:
    check_model_supported(of_type("Gemma2Config"), EVERYTHING)
    check_model_supported(of_type("GptOssConfig"), EVERYTHING)
    with pytest.raises(UnsupportedModelError, match="sliding windows"):
        check_model_supported(tiny_config("mistral"), NOTHING)


KNOWN_TYPES = frozenset(CONFIG_MAPPING)
REMOTE = {
    "model_type": "inhouse",
    "architectures": ["InHouseForCausalLM"],
    "auto_map": {"AutoConfig": "configuration.InHouseConfig"},
}


def test_code_that_comes_with_weights_needs_the_operators_word() -> None:
    with pytest.raises(UnsupportedModelError, match=r"InHouseForCausalLM.*--trust-remote-code"):
        check_remote_code(REMOTE, KNOWN_TYPES, trust_remote_code=False)
    check_remote_code(REMOTE, KNOWN_TYPES, trust_remote_code=True)


def test_a_model_type_that_nobody_knows_is_refused_even_if_code_is_trusted() -> None:
    with pytest.raises(UnsupportedModelError, match="not known"):
        check_remote_code({"model_type": "nobody"}, KNOWN_TYPES, trust_remote_code=True)


def test_a_known_family_with_an_auto_map_runs_the_librarys_code() -> None:
    check_remote_code({**REMOTE, "model_type": "llama"}, KNOWN_TYPES, trust_remote_code=False)
