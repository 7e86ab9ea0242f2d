"""Which configurations the fused decoder runs, and the sizes it takes from them. Reads no weights."""

from dataclasses import dataclass

from transformers import PretrainedConfig

from worker.model import shape_from_config
from worker.model_config import window_reason

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
#: position scalings whose inverse frequencies do not change while the model runs
STATIC_ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes and switches of one model. `windows`: each layer's sliding window, None where it sees everything.

    `has_output_bias` is the bias of the projection behind the attention. `ties_embeddings`: a head that is not stored
    is the embedding.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    epsilon: float
    windows: tuple[int | None, ...]
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_head_norms: bool
    ties_embeddings: bool

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_size


def unfused_reason(config: PretrainedConfig) -> str | None:
    """Why this model is left to Transformers; None if the fused decoder runs it."""
    if config.model_type not in FAMILIES:
        return f"model type {config.model_type}"
    if getattr(config, "auto_map", None):
        return "code of its own"
    if getattr(config, "is_heterogeneous", False):
        return "layers that differ in their configuration"
    if config.hidden_act != "silu":
        return f"activation {config.hidden_act}"
    rope = config.rope_parameters
    if rope.get("rope_type") not in STATIC_ROPE_TYPES:
        return f"position scaling {rope.get('rope_type')}"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "positions in a part of each head"
    if config.num_attention_heads % shape_from_config(config).num_kv_heads:
        return "query heads that do not share keys evenly"
    return window_reason(config)


def decoder_shape(config: PretrainedConfig) -> DecoderShape:
    """The shape of a configuration for which `unfused_reason` is None."""
    shape = shape_from_config(config)
    has_attention_bias = bool(getattr(config, "attention_bias", False))
    return DecoderShape(
        num_layers=shape.num_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        vocab_size=config.vocab_size,
        epsilon=config.rms_norm_eps,
        windows=_windows(config),
        has_qkv_bias=config.model_type == "qwen2" or (has_attention_bias and config.model_type != "mistral"),
        has_output_bias=has_attention_bias and config.model_type in ("llama", "qwen3"),
        has_mlp_bias=config.model_type == "llama" and bool(config.mlp_bias),
        has_head_norms=config.model_type == "qwen3",
        ties_embeddings=bool(config.tie_word_embeddings),
    )


def _windows(config: PretrainedConfig) -> tuple[int | None, ...]:
    num_layers = config.num_hidden_layers
    if config.model_type == "llama":
        return (None,) * num_layers
    if config.model_type == "mistral":
        return (config.sliding_window,) * num_layers
    return tuple(config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types)
