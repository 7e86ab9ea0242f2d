"""Attention over the paged cache: one protocol, one file a backend, chosen by name."""

from worker.attention.backend import AttentionBackend, AttentionBatch, AttentionFeatures, AttentionNotSupported
from worker.attention.torch_sdpa import TorchSdpaBackend

BACKENDS = {"torch_sdpa": TorchSdpaBackend}


def choose_backend(name: str) -> type[TorchSdpaBackend]:
    """The backend class for an option value; `auto` is `torch_sdpa`, which runs everywhere. KeyError if unknown."""
    return BACKENDS["torch_sdpa" if name == "auto" else name]


__all__ = [
    "BACKENDS",
    "AttentionBackend",
    "AttentionBatch",
    "AttentionFeatures",
    "AttentionNotSupported",
    "TorchSdpaBackend",
    "choose_backend",
]
