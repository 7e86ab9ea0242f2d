"""Which attention backend and which decoder run a model on this machine, where the options leave it open.

Naming `torch_sdpa` asks for the plain path: Transformers' own layers over PyTorch's attention, which all others are
held against.
"""

from pathlib import Path

import torch
from transformers import PretrainedConfig

from worker.attention import BACKENDS, BackendType, CpuNativeBackend, TorchSdpaBackend
from worker.config import ConfigError, EngineConfig
from worker.fused.family import unfused_reason
from worker.fused.native_decoder import NativeDecoder, not_native_reason
from worker.fused.torch_decoder import TorchDecoder
from worker.model import load_causal_model
from worker.model_runner import RunnableModel
from worker.native.build import NativeUnavailableError, ensure_kernels
from worker.native.kernels import LANES, MAX_HEAD_SIZE


def choose_backend(
    name: str, device: str, dtype: torch.dtype, head_size: int
) -> tuple[BackendType, tuple[str, ...]]:
    """The backend class for an option value, and notes for the operator.

    `auto` on a CPU is `cpu_native` where it can be built and runs this dtype and head size, else `torch_sdpa`.
    Raises `ConfigError` if `cpu_native` is asked for by name and cannot be had.
    """
    if name not in ("auto", CpuNativeBackend.name) or (name == "auto" and device != "cpu"):
        return BACKENDS[TorchSdpaBackend.name if name == "auto" else name], ()
    reason = None
    if dtype not in CpuNativeBackend.features.dtypes:
        reason = f"they do not run {dtype}"
    elif head_size % LANES or head_size > MAX_HEAD_SIZE:
        reason = f"they do not run heads of {head_size}"
    else:
        try:
            ensure_kernels()
        except NativeUnavailableError as error:
            reason = str(error)
    if reason is None:
        return CpuNativeBackend, ()
    if name != "auto":
        raise ConfigError("attention_backend", f"the kernels of {name} cannot be used: {reason}")
    return TorchSdpaBackend, (f"CPU kernels are not used, and steps take longer: {reason}",)


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
