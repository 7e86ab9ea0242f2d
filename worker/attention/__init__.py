"""Attention over the paged cache: one protocol, one file a backend, chosen by name."""

from worker.attention.backend import AttentionBackend, AttentionBatch, AttentionFeatures, AttentionNotSupported
from worker.attention.cpu_native import CpuNativeBackend
from worker.attention.torch_sdpa import TorchSdpaBackend

BackendType = type[TorchSdpaBackend] | type[CpuNativeBackend]

BACKENDS: dict[str, BackendType] = {"torch_sdpa": TorchSdpaBackend, "cpu_native": CpuNativeBackend}

__all__ = [
    "BACKENDS",
    "AttentionBackend",
    "AttentionBatch",
    "AttentionFeatures",
    "AttentionNotSupported",
    "BackendType",
    "CpuNativeBackend",
    "TorchSdpaBackend",
]
