"""The attention backends that there are, asked for by name as the engine asks for them."""

import torch

from worker.attention import BACKENDS, AttentionNeeds, BackendType
from worker.choices import choose_backend

#: where steps are timed: what the engine takes by itself, and on a CPU, where Triton is interpreted, the plain one
TIMED_BACKEND = {"cuda": "auto", "cpu": "torch_sdpa"}
#: pages that every backend for CUDA can have
TIMED_BLOCK_SIZE = {"cuda": 256, "cpu": 16}


def backend_names(device: str) -> list[str]:
    """Those of the table, without the one that only a CPU can have."""
    return [name for name in BACKENDS if device == "cpu" or name != "cpu_native"]


def backend_class(name: str, device: str, dtype: torch.dtype, head_size: int, block_size: int) -> BackendType:
    """Raises ConfigError, which names the reason, where the engine would refuse it."""
    capability = torch.cuda.get_device_capability() if device == "cuda" else None
    needs = AttentionNeeds(device, dtype, head_size, block_size, capability=capability)
    return choose_backend(name, needs)[0]
