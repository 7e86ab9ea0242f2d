"""What this engine cannot run, told from a model's configuration before its weights are touched.

Every refusal names the architecture and the reason. What a configuration does not show (layers that bypass the
attention interface) is found by `worker.model`, which raises the same error.
"""

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from worker.attention.backend import AttentionFeatures

#: Families that carry state outside the key-value cache, as their configurations call themselves.
_STATE_SPACE_TYPES = frozenset(
    {
        "mamba", "mamba2", "falcon_mamba", "rwkv", "jamba", "bamba", "zamba", "zamba2", "falcon_h1",
        "nemotron_h", "recurrent_gemma", "xlstm", "lfm2", "lfm2_moe", "granitemoehybrid",
        "qwen3_next", "kimi_linear", "minimax", "bailing_hybrid", "olmo_hybrid",
    }
)  # fmt: skip
#: Families whose attention always has sink logits.
_SINK_TYPES = frozenset({"gpt_oss"})
_CACHEABLE_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
_CAUSAL_SUFFIXES = ("ForCausalLM", "LMHeadModel")


class UnsupportedModelError(ValueError):
    """This model cannot be served. `architecture` names it, `reason` says why."""

    def __init__(self, architecture: str, reason: str) -> None:
        super().__init__(f"model architecture {architecture} is not supported: {reason}")
        self.architecture = architecture
        self.reason = reason


def architecture_name(config: PretrainedConfig) -> str:
    """The name people know a checkpoint's class by, or else its model type."""
    architectures = getattr(config, "architectures", None)
    return architectures[0] if architectures else config.model_type


def check_remote_code(config_json: dict, known_model_types: frozenset[str], *, trust_remote_code: bool) -> None:
    """Refuse a folder whose model exists only as code inside it, unless the operator trusts that code."""
    model_type = config_json.get("model_type", "")
    if model_type in known_model_types:
        return
    architectures = config_json.get("architectures") or [model_type or "(none named)"]
    if "auto_map" not in config_json:
        raise UnsupportedModelError(architectures[0], f"model type {model_type!r} is not known to Transformers")
    if not trust_remote_code:
        raise UnsupportedModelError(
            architectures[0], "its code comes with its weights; --trust-remote-code would run it"
        )


def check_model_supported(config: PretrainedConfig, features: AttentionFeatures) -> None:
    """Raise `UnsupportedModelError` for the first thing about this model that the engine or backend lacks."""
    check_model_kind(config)
    reason = _attention_reason(config, features)
    if reason is not None:
        raise UnsupportedModelError(architecture_name(config), reason)


def check_model_kind(config: PretrainedConfig) -> None:
    """Raise `UnsupportedModelError` for what no attention backend would change."""
    reason = (
        _kind_reason(config) or _layer_reason(config) or _position_reason(config) or _interface_reason(config)
    )
    if reason is not None:
        raise UnsupportedModelError(architecture_name(config), reason)


def _kind_reason(config: PretrainedConfig) -> str | None:
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model"
    parts = [name for name in ("vision_config", "audio_config", "text_config") if getattr(config, name, None)]
    if parts or config.sub_configs:
        return f"it is a multimodal or composite model ({', '.join(parts or config.sub_configs)})"
    quantization = getattr(config, "quantization_config", None)
    if quantization:
        method = (
            quantization.get("quant_method")
            if isinstance(quantization, dict)
            else getattr(quantization, "quant_method", None)
        )
        return f"its weights are quantized ({method or 'unnamed method'})"
    if config.model_type in _STATE_SPACE_TYPES:
        return "it is a state-space or hybrid model, whose state is not in the key-value cache"
    architectures = getattr(config, "architectures", None)
    if architectures and not architectures[0].endswith(_CAUSAL_SUFFIXES):
        return "it is not a causal language model"
    # Encoders that can also be built as decoders say so by these two fields together.
    is_encoder = hasattr(config, "add_cross_attention") and getattr(config, "is_decoder", None) is False
    if is_encoder or getattr(config, "is_causal", True) is False:
        return "it is an encoder: its attention looks both ways"
    if getattr(config, "use_bidirectional_attention", False):
        return "its attention looks both ways"
    return None


def _layer_reason(config: PretrainedConfig) -> str | None:
    if getattr(config, "is_heterogeneous", False):
        return "its layers differ in their configuration (per_layer_config)"
    layer_types = getattr(config, "layer_types", None) or ()
    unknown = sorted(set(layer_types) - _CACHEABLE_LAYER_TYPES)
    if unknown:
        return f"it has layers of type {', '.join(unknown)}"
    if getattr(config, "attention_chunk_size", None):
        return "its attention is chunked"
    if getattr(config, "kv_lora_rank", None):
        return "it uses latent attention (MLA), whose keys and values differ in size"
    if getattr(config, "num_kv_shared_layers", 0):
        return "its layers share keys and values"
    return None


def _position_reason(config: PretrainedConfig) -> str | None:
    parameters = getattr(config, "rope_parameters", None) or {}
    # Either one set of parameters, or one for each layer type.
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for values in nested or [parameters]:
        rope_type = values.get("rope_type", values.get("type"))
        if rope_type in _BATCH_DEPENDENT_ROPE:
            return f"its position scaling {rope_type!r} depends on the longest sequence of a batch"
    if getattr(config, "alibi", False):
        return "it uses ALiBi position biases"
    return None


def needs_softcap(config: PretrainedConfig) -> bool:
    return bool(getattr(config, "attn_logit_softcapping", None))


def needs_sinks(config: PretrainedConfig) -> bool:
    return config.model_type in _SINK_TYPES


def needs_sliding_window(config: PretrainedConfig) -> bool:
    return getattr(config, "sliding_window", None) is not None


def _attention_reason(config: PretrainedConfig, features: AttentionFeatures) -> str | None:
    if needs_softcap(config) and not features.softcap:
        return "it needs attention logit softcapping, which the attention backend does not implement"
    if needs_sinks(config) and not features.sinks:
        return "it needs attention sinks, which the attention backend does not implement"
    if needs_sliding_window(config) and not features.sliding_window:
        return "it needs sliding windows, which the attention backend does not implement"
    return None


def _interface_reason(config: PretrainedConfig) -> str | None:
    # A class that came with its weights is known only once it is loaded, and is examined there.
    if getattr(config, "auto_map", None) and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return "Transformers has no causal language model for it"
    if not MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._supports_attention_backend:
        return "its code does not use the attention interface of Transformers"
    return None
