"""Attention over the paged cache: one protocol, one file a backend, chosen by name."""

from worker.attention.backend import (
    AttentionBackend,
    AttentionBatch,
    AttentionFeatures,
    AttentionNeeds,
    AttentionNotSupported,
)
from worker.attention.cpu_native import CpuNativeBackend
from worker.attention.flash_attn import FlashAttnBackend
from worker.attention.torch_sdpa import TorchSdpaBackend
from worker.attention.torch_varlen import TorchVarlenBackend
from worker.attention.triton_paged import TritonBackend

BackendType = (
    type[TorchSdpaBackend]
    | type[CpuNativeBackend]
    | type[FlashAttnBackend]
    | type[TorchVarlenBackend]
    | type[TritonBackend]
)

BACKENDS: dict[str, BackendType] = {
    backend.name: backend
    for backend in (TorchSdpaBackend, CpuNativeBackend, FlashAttnBackend, TorchVarlenBackend, TritonBackend)
}

__all__ = [
    "BACKENDS",
    "AttentionBackend",
    "AttentionBatch",
    "AttentionFeatures",
    "AttentionNeeds",
    "AttentionNotSupported",
    "BackendType",
    "CpuNativeBackend",
    "FlashAttnBackend",
    "TorchSdpaBackend",
    "TorchVarlenBackend",
    "TritonBackend",
]
