"""The seam between a model's layers and the paged cache: what a batch is and what a backend promises."""

from dataclasses import dataclass
from typing import Protocol

import torch


class AttentionNotSupported(ValueError):
    """A layer asked for something that the backend does not compute. Never answered by ignoring it."""


@dataclass(slots=True, eq=False)
class AttentionBatch:
    """One step's rows, flattened. T tokens, R rows; row r owns tokens `query_start_locs[r]` to `[r + 1]`.

    slot_mapping [T]: where each token's key and value go (`block * block_size + offset`).
    block_tables [R, max blocks]: ids of each row's blocks, filled up with the null block 0.
    query_start_locs [R + 1], context_lens [R] (tokens of the row after this step), positions [T].
    `query_lens` and `row_context_lens` are the same facts on the host, so that nothing waits for the device. While a
    step is captured as a CUDA graph, `row_context_lens` and the tables' width are what a row can have at most.
    `started_blocks`: blocks whose first slot this step writes; whatever they held before is nobody's.

    Padding, for backends that `features.cuda_graphs` says can take it: a row of one query whose context_len is 0, whose
    slot is -1 and whose table names the null block. Nothing is written for it, and its output is zeros.
    """

    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    query_start_locs: torch.Tensor
    context_lens: torch.Tensor
    positions: torch.Tensor
    query_lens: list[int]
    row_context_lens: list[int]
    started_blocks: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionFeatures:
    """What a backend computes beyond causal grouped-query attention with a prefix, and where. Empty or None: any.

    Block sizes must be a multiple of `block_size_multiple`, head sizes one of `head_size_multiple` up to
    `max_head_size`; `min_capability` is the oldest CUDA compute capability. `cuda_graphs`: a step whose rows all have
    one query can be captured, `begin` and `forward` together: they launch work that depends on the number of rows and
    the width of the block tables alone, and take padding rows.
    """

    sliding_window: bool
    softcap: bool
    sinks: bool
    block_size_multiple: int = 1
    dtypes: tuple[torch.dtype, ...] = ()
    device_types: tuple[str, ...] = ()
    head_size_multiple: int = 1
    max_head_size: int | None = None
    min_capability: tuple[int, int] | None = None
    cuda_graphs: bool = False


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """What a model on a machine asks of a backend. `block_size` None: the backend's choice; `capability`: of the CUDA
    device, None where there is none."""

    device: str
    dtype: torch.dtype
    head_size: int
    block_size: int | None = None
    sliding_window: bool = False
    softcap: bool = False
    sinks: bool = False
    capability: tuple[int, int] | None = None


class AttentionBackend(Protocol):
    """Writes keys and values into the pool and attends over them. `begin` once a step, `forward` once a layer."""

    name: str
    features: AttentionFeatures

    @classmethod
    def missing(cls, device: str) -> str | None:
        """What this machine lacks to run the backend on such a device, as a clause, or None. May take seconds."""
        ...

    def begin(self, batch: AttentionBatch) -> None:
        """Prepare what all layers of this step share."""
        ...

    def forward(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query [T, heads, head_size], key and value [T, kv_heads, head_size] → [T, heads, head_size].

        A token sees the keys of its own row up to itself, and with `sliding_window` w only the last w of those.
        Raises `AttentionNotSupported` for an argument that the backend does not implement.
        """
        ...


def refuse_unimplemented(backend: AttentionBackend, softcap: float | None, sinks: torch.Tensor | None) -> None:
    """Raises `AttentionNotSupported` for what a layer asks and the backend's features leave out. Once a layer."""
    if softcap is not None and not backend.features.softcap:
        raise AttentionNotSupported(f"attention backend {backend.name} does not implement logit softcapping")
    if sinks is not None and not backend.features.sinks:
        raise AttentionNotSupported(f"attention backend {backend.name} does not implement attention sinks")
