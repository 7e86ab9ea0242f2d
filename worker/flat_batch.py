"""Scheduled chunks as the flat tensors of one forward pass.

Owns the buffers, which hold the largest step and are reused, by turns where a step is prepared while another runs.
What grows with tokens or blocks is done by numpy; plain Python touches each row a few times.
"""

from itertools import chain

import numpy as np
import torch

from kv_cache import NULL_BLOCK
from scheduler.outputs import ScheduledChunk
from worker.attention.backend import AttentionBatch

#: A row that is there for its number alone. It ends before its sequence's first position, so that nothing of it is in
#: the cache; nothing is written for it, and what comes of it is dropped.
PADDING = ScheduledChunk("padding", -1, -1, [0], [], is_prefill=False, do_sample=True)


class FlatBatch:
    """The tensors that `fill` returns are views of the buffers: of the last `num_steps` calls they may still be read,
    by a device that runs the steps in their order."""

    def __init__(
        self,
        max_tokens: int,
        max_rows: int,
        max_blocks_per_row: int,
        block_size: int,
        device: torch.device,
        num_steps: int = 1,
    ) -> None:
        def buffer(size: int) -> _Buffer:
            return _Buffer(size, device, num_steps)

        self._block_size = block_size
        self._input_ids = buffer(max_tokens)
        self._positions = buffer(max_tokens)
        self._slot_mapping = buffer(max_tokens)
        self._started_blocks = buffer(max_tokens)
        self._query_start_locs = buffer(max_rows + 1)
        self._context_lens = buffer(max_rows)
        self._logit_rows = buffer(max_rows)
        self._block_tables = buffer(max_rows * max_blocks_per_row)
        self._fixed_tables = torch.zeros((max_rows, max_blocks_per_row), dtype=torch.long, device=device)
        self.lowest_token_id = 0

    def fill(
        self, chunks: list[ScheduledChunk], *, has_fixed_shape: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, AttentionBatch]:
        """(token ids [T], places in T whose logits are wanted, the batch) of at least one chunk.

        `has_fixed_shape`: shapes, addresses and what the host is told depend on the numbers of rows and tokens alone,
        and rows may be `PADDING`. Block tables are as wide as any can be, what lies beyond a row's own blocks are any
        blocks; `row_context_lens` are what a row has at most; `started_blocks` [T] is filled up with the null block.
        """
        block_size = self._block_size
        query_lens = [len(chunk.token_ids) for chunk in chunks]
        context_lens = [chunk.start + query_len for chunk, query_len in zip(chunks, query_lens, strict=True)]
        lengths, contexts = np.array(query_lens), np.array(context_lens)
        num_tokens = int(lengths.sum())
        starts = np.zeros(len(chunks) + 1, np.int64)
        np.cumsum(lengths, out=starts[1:])
        token_ids = np.fromiter(chain.from_iterable(chunk.token_ids for chunk in chunks), np.int64, num_tokens)
        self.lowest_token_id = int(token_ids.min())
        # Position of a token: its place in its row, counted from the row's first scheduled token.
        positions = np.arange(num_tokens) + np.repeat(contexts - starts[1:], lengths)
        columns, offsets = np.divmod(positions, block_size)
        widths = (contexts - 1) // block_size + 1
        # Rows of different length fill one rectangle; what is left over names the null block.
        widest = int(widths.max(initial=1))
        tables = np.zeros((len(chunks), widest), np.int64)
        tables[np.arange(widest) < widths[:, None]] = np.fromiter(
            chain.from_iterable(
                chunk.block_table[:width] for chunk, width in zip(chunks, widths.tolist(), strict=True)
            ),
            np.int64,
            int(widths.sum()),
        )
        blocks = tables[np.repeat(np.arange(len(chunks)), lengths), columns]
        slots, started = blocks * block_size + offsets, blocks[offsets == 0]
        row_tables = self._block_tables.fill(tables.ravel()).view(len(chunks), widest)
        if has_fixed_shape:
            started = np.concatenate([started, np.full(num_tokens - len(started), NULL_BLOCK)])
            self._fixed_tables[: len(chunks), :widest] = row_tables
            row_tables = self._fixed_tables[: len(chunks)]
            context_lens = [row_tables.shape[1] * block_size] * len(chunks)
            slots[positions < 0] = -1
            positions = positions.clip(min=0)
        wanted = np.fromiter((chunk.do_sample for chunk in chunks), bool, len(chunks))
        batch = AttentionBatch(
            slot_mapping=self._slot_mapping.fill(slots),
            block_tables=row_tables,
            query_start_locs=self._query_start_locs.fill(starts),
            context_lens=self._context_lens.fill(contexts),
            positions=self._positions.fill(positions),
            query_lens=query_lens,
            row_context_lens=context_lens,
            started_blocks=self._started_blocks.fill(started),
        )
        return self._input_ids.fill(token_ids), self._logit_rows.fill(starts[1:][wanted] - 1), batch


class _Buffer:
    """Whole numbers on the host, in `num_steps` memories by turns, and their copy on the device, which is one for all
    steps since copies and steps keep their order there; on the CPU host and device are one."""

    def __init__(self, size: int, device: torch.device, num_steps: int) -> None:
        is_cuda = device.type == "cuda"
        self._hosts = [torch.zeros(size, dtype=torch.long, pin_memory=is_cuda) for _ in range(num_steps)]
        self._arrays = [host.numpy() for host in self._hosts]
        self._turn = 0
        self._device = torch.zeros(size, dtype=torch.long, device=device) if is_cuda else None

    def fill(self, numbers: np.ndarray) -> torch.Tensor:
        """The first `len(numbers)` places, set to them, on the device."""
        size = len(numbers)
        # The copies of the step before may still have to leave its memory.
        self._turn = (self._turn + 1) % len(self._hosts)
        host = self._hosts[self._turn]
        self._arrays[self._turn][:size] = numbers
        if self._device is None:
            return host[:size]
        self._device[:size].copy_(host[:size], non_blocking=True)
        return self._device[:size]
