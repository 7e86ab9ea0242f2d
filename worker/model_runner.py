"""From a step's decisions to logits: flat tensors in, one row of logits for each row that samples.

Owns the batch buffers. It moves no blocks: the engine applies a step's swaps before it calls `execute`.
"""

import torch

from kv_cache.tensor_pool import TensorPool
from scheduler.outputs import PENDING_TOKEN_ID, ScheduledChunk, SchedulerOutputs
from worker.attention.backend import AttentionBackend, AttentionBatch
from worker.model import CausalModel


class ModelRunner:
    """Runs mixed prefill and decode rows in one forward pass. Its buffers hold the largest step and are reused."""

    def __init__(
        self,
        model: CausalModel,
        tensor_pool: TensorPool,
        backend: AttentionBackend,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_blocks_per_sequence: int,
    ) -> None:
        self._model = model
        self._pool = tensor_pool
        self._backend = backend
        device = model.device
        tokens, rows = max_num_batched_tokens, max_num_seqs
        self._input_ids = _Buffer(tokens, device)
        self._positions = _Buffer(tokens, device)
        self._slot_mapping = _Buffer(tokens, device)
        self._started_blocks = _Buffer(tokens, device)
        self._query_start_locs = _Buffer(rows + 1, device)
        self._context_lens = _Buffer(rows, device)
        self._logit_rows = _Buffer(rows, device)
        self._block_tables = _Buffer(rows * max_blocks_per_sequence, device)

    @torch.inference_mode()
    def execute(self, outputs: SchedulerOutputs) -> torch.Tensor:
        """Logits of the chunks with `do_sample`, in their order: float32 [number of them, vocabulary]."""
        chunks = outputs.chunks
        if not chunks:
            return torch.empty((0, self._model.vocab_size), device=self._model.device)
        input_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
        assert min(input_ids) > PENDING_TOKEN_ID, "a token was scheduled that is not known yet"
        logit_rows: list[int] = []
        num_tokens = 0
        for chunk in chunks:
            num_tokens += len(chunk.token_ids)
            if chunk.do_sample:
                logit_rows.append(num_tokens - 1)
        batch = self._batch(chunks)
        self._backend.begin(batch)
        return self._model.forward(
            self._input_ids.fill(input_ids), batch.positions, self._logit_rows.fill(logit_rows), self._backend
        )

    def _batch(self, chunks: list[ScheduledChunk]) -> AttentionBatch:
        block_size = self._pool.block_size
        positions: list[int] = []
        slot_mapping: list[int] = []
        started_blocks: list[int] = []
        query_start_locs = [0]
        query_lens: list[int] = []
        context_lens: list[int] = []
        for chunk in chunks:
            query_len = len(chunk.token_ids)
            end = chunk.start + query_len
            table = chunk.block_table
            positions += range(chunk.start, end)
            first_column = chunk.start // block_size
            for column in range(first_column, (end - 1) // block_size + 1):
                block_start = column * block_size
                first_slot = table[column] * block_size
                low, high = max(chunk.start, block_start), min(end, block_start + block_size)
                slot_mapping += range(first_slot + low - block_start, first_slot + high - block_start)
                if low == block_start:
                    started_blocks.append(table[column])
            query_lens.append(query_len)
            context_lens.append(end)
            query_start_locs.append(query_start_locs[-1] + query_len)
        # Rows of different length fill one rectangle; what is left over names the null block.
        widths = [(context_len - 1) // block_size + 1 for context_len in context_lens]
        widest = max(widths)
        tables: list[int] = []
        for chunk, width in zip(chunks, widths, strict=True):
            tables += chunk.block_table[:width]
            tables += [0] * (widest - width)
        return AttentionBatch(
            slot_mapping=self._slot_mapping.fill(slot_mapping),
            block_tables=self._block_tables.fill(tables).view(len(chunks), widest),
            query_start_locs=self._query_start_locs.fill(query_start_locs),
            context_lens=self._context_lens.fill(context_lens),
            positions=self._positions.fill(positions),
            query_lens=query_lens,
            row_context_lens=context_lens,
            started_blocks=self._started_blocks.fill(started_blocks),
        )


class _Buffer:
    """Whole numbers on the host and their copy on the device; on the CPU both are one."""

    def __init__(self, size: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.long, pin_memory=is_cuda)
        self._device = torch.zeros(size, dtype=torch.long, device=device) if is_cuda else self._host

    def fill(self, numbers: list[int]) -> torch.Tensor:
        """The first `len(numbers)` places, set to them, on the device."""
        size = len(numbers)
        self._host[:size] = torch.tensor(numbers, dtype=torch.long)
        if self._device is not self._host:
            self._device[:size].copy_(self._host[:size], non_blocking=True)
        return self._device[:size]
