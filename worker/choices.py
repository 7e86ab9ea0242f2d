"""Which attention backend and which decoder run a model on this machine, where the options leave it open.

Naming `torch_sdpa` asks for the plain path: Transformers' own layers over PyTorch's attention, which all others are
held against.
"""

from pathlib import Path

import torch
from transformers import PretrainedConfig

from worker.attention import (
    BACKENDS,
    AttentionNeeds,
    BackendType,
    CpuNativeBackend,
    FlashAttnBackend,
    TorchSdpaBackend,
    TorchVarlenBackend,
    TritonBackend,
)
from worker.attention.refusals import refusal
from worker.config import DEFAULT_BLOCK_SIZE, ConfigError, EngineConfig
from worker.fused.family import unfused_reason
from worker.fused.native_decoder import NativeDecoder, not_native_reason
from worker.fused.torch_decoder import TorchDecoder
from worker.model import load_causal_model
from worker.model_runner import RunnableModel
from worker.model_support import needs_sinks, needs_sliding_window, needs_softcap

#: What `auto` takes, the first that fits.
_ORDER: dict[str, tuple[BackendType, ...]] = {
    "cpu": (CpuNativeBackend, TorchSdpaBackend),
    "cuda": (FlashAttnBackend, TritonBackend, TorchVarlenBackend, TorchSdpaBackend),
}


def choose_backend(name: str, needs: AttentionNeeds) -> tuple[BackendType, tuple[str, ...]]:
    """The backend class for an option value, and notes for the operator on why no better one was taken.

    Raises `ConfigError` if the backend asked for by name cannot run these needs. `auto` falls back to `torch_sdpa`,
    whatever is needed: what that lacks is the model's refusal.
    """
    if name != "auto":
        refused = refusal(BACKENDS[name], needs)
        if refused is not None:
            raise ConfigError(refused.option, f"attention backend {refused.reason}")
        return BACKENDS[name], ()
    reasons = []
    for backend_type in _ORDER[needs.device]:
        refused = refusal(backend_type, needs)
        if refused is None or backend_type is TorchSdpaBackend:
            break
        reasons.append(refused.reason)
    if not reasons:
        return backend_type, ()
    slower = ", and steps take longer" if backend_type is TorchSdpaBackend else ""
    return backend_type, (f"attention backend {backend_type.name} is used{slower}: {'; '.join(reasons)}",)


def default_block_size(backend_type: BackendType) -> int:
    """Tokens in one block where no option says."""
    return max(DEFAULT_BLOCK_SIZE, backend_type.features.block_size_multiple)


def attention_needs(
    hf_config: PretrainedConfig, head_size: int, dtype: torch.dtype, device: str, block_size: int | None
) -> AttentionNeeds:
    """What this model on this machine's device asks of a backend; `block_size` as far as an option gives it."""
    return AttentionNeeds(
        device=device,
        dtype=dtype,
        head_size=head_size,
        block_size=block_size,
        sliding_window=needs_sliding_window(hf_config),
        softcap=needs_softcap(hf_config),
        sinks=needs_sinks(hf_config),
        capability=torch.cuda.get_device_capability() if device == "cuda" else None,
    )


def choose_model(
    config: EngineConfig,
    folder: Path,
    hf_config: PretrainedConfig,
    dtype: torch.dtype,
    device: str,
    backend_type: BackendType,
) -> RunnableModel:
    """The model, loaded: fused on a CPU where its family is known, Transformers' own otherwise."""
    if backend_type is CpuNativeBackend and not_native_reason(hf_config, dtype) is None:
        return NativeDecoder(folder, hf_config, dtype)
    if config.attention_backend == "auto" and device == "cpu" and unfused_reason(hf_config) is None:
        return TorchDecoder(folder, hf_config, dtype)
    return load_causal_model(
        folder, hf_config, dtype, device, backend_type.features, trust_remote_code=config.trust_remote_code
    )
