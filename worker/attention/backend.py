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
    """What a backend computes beyond causal grouped-query attention with a prefix. `dtypes` empty: any;
    `block_size_multiple`: block sizes must be a multiple of it."""

    sliding_window: bool
    softcap: bool
    sinks: bool
    block_size_multiple: int = 1
    #: a step of one query a row is the same launches whatever the tensors hold: `begin` and `forward` may be captured
    cuda_graphs: bool = False
    dtypes: tuple[torch.dtype, ...] = ()
    device_types: tuple[str, ...] = ()


class AttentionBackend(Protocol):
    """Writes keys and values into the pool and attends over them. `begin` once a step, `forward` once a layer."""

    name: str
    features: AttentionFeatures

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
