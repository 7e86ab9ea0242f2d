"""A checkpoint's config.json as Transformers reads it, refused by name where its numbers make no model.

What Transformers itself would not take, or would take and compute nonsense of, ends here, before anything is divided
by a size or built from it. Knows neither options nor weights.
"""

import math
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from worker.model_support import UnsupportedModelError, architecture_name, check_model_kind, check_remote_code
from worker.weights import WeightsError, read_json_object

_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings")
#: absent or null: as the number of heads and the hidden size say
_HEAD_SIZES = ("num_key_value_heads", "head_dim")
_ROPE_NUMBERS = (
    "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "attention_factor",
    "original_max_position_embeddings",
)  # fmt: skip


def load_model_config(folder: Path, *, trust_remote_code: bool) -> PretrainedConfig:
    """The configuration of a checkpoint, whose own code is touched only if the operator trusts it.

    Raises `WeightsError` for a file that is none, `UnsupportedModelError` for a model that cannot be.
    """
    path = folder / "config.json"
    config_json = read_json_object(path)
    _check_names(path, config_json)
    check_remote_code(config_json, frozenset(CONFIG_MAPPING), trust_remote_code=trust_remote_code)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # each configuration class raises what it likes
        name = (config_json.get("architectures") or [config_json["model_type"]])[0]
        raise UnsupportedModelError(name, f"its config.json cannot be used ({one_line(error)})") from error
    check_model_kind(config)
    check_model_numbers(config)
    return config


def check_model_numbers(config: PretrainedConfig) -> None:
    """Raise `UnsupportedModelError` for the first number of a decoder's configuration that cannot be meant."""
    reason = _size_reason(config) or _activation_reason(config) or _scaling_reason(config) or window_reason(config)
    if reason is not None:
        raise UnsupportedModelError(architecture_name(config), reason)


def window_reason(config: PretrainedConfig) -> str | None:
    """Why the sliding window of the layers that have one cannot be meant; None if it can."""
    layer_types = getattr(config, "layer_types", None)
    # A family that does not know the field ignores it.
    if not hasattr(type(config), "sliding_window") or (layer_types and "sliding_attention" not in layer_types):
        return None
    window = config.sliding_window
    if layer_types and window is None:
        return "it has layers of type sliding_attention and no sliding_window"
    if window is not None and not _is_count(window):
        return f"its sliding_window is {window!r}, which leaves a token nothing to see"
    return None


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _check_names(path: Path, config_json: dict[str, Any]) -> None:
    if not isinstance(config_json.get("model_type", ""), str):
        raise WeightsError(f"{path}: model_type is no name: {config_json['model_type']!r}")
    architectures = config_json.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise WeightsError(f"{path}: architectures is no list of names: {architectures!r}")


def _size_reason(config: PretrainedConfig) -> str | None:
    for name in _SIZES:
        size = getattr(config, name, None)
        if not _is_count(size):
            return f"its {name} is {size!r}"
    for name in _HEAD_SIZES:
        size = getattr(config, name, None)
        if size is not None and not _is_count(size):
            return f"its {name} is {size!r}"
    num_heads, num_kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    if not _head_size(config):
        return f"its hidden_size of {config.hidden_size} is below its {num_heads} heads"
    if num_kv_heads is not None and num_heads % num_kv_heads:
        return f"its {num_heads} query heads cannot share {num_kv_heads} key and value heads evenly"
    return None


def _activation_reason(config: PretrainedConfig) -> str | None:
    name = getattr(config, "hidden_act", None)
    return f"its activation {name!r} is not known" if isinstance(name, str) and name not in ACT2FN else None


def _scaling_reason(config: PretrainedConfig) -> str | None:
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [values for values in parameters.values() if isinstance(values, dict)]
    for values in nested or [parameters]:
        if parameters and _head_size(config) % 2 and values.get("partial_rotary_factor", 1.0) == 1.0:
            return f"its heads of {_head_size(config)} have no halves to rotate"
        rope_type = values.get("rope_type", "default")
        if rope_type != "default" and rope_type not in ROPE_INIT_FUNCTIONS:
            return f"its position scaling {rope_type!r} is not known"
        for name in _ROPE_NUMBERS:
            number = values.get(name)
            if number is not None and not _is_positive(number):
                return f"the {name} of its position scaling is {number!r}"
    return None


def _head_size(config: PretrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
