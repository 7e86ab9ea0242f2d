"""Steps of known content for a runner: decodes behind so much context, or a chunk of one prompt."""

from collections.abc import Sequence

from scheduler.outputs import ScheduledChunk, SchedulerOutputs


def blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def decode_step(contexts: Sequence[int], block_size: int) -> SchedulerOutputs:
    """A row for each of `contexts`: its newest token, the last of so many, over blocks of its own from block 1 on."""
    chunks, first_block = [], 1
    for row, context in enumerate(contexts):
        end_block = first_block + blocks_for(context, block_size)
        table = list(range(first_block, end_block))
        chunks.append(
            ScheduledChunk(f"row {row}", row, context - 1, [row % 100 + 3], table, is_prefill=False, do_sample=True)
        )
        first_block = end_block
    return SchedulerOutputs(1, chunks, num_batched_tokens=len(chunks))


def prefill_step(chunk_len: int, context: int, block_size: int) -> SchedulerOutputs:
    """The last `chunk_len` of the first `context` tokens of a prompt."""
    token_ids = [place % 100 + 3 for place in range(chunk_len)]
    table = list(range(1, 1 + blocks_for(context, block_size)))
    chunk = ScheduledChunk("prompt", 0, context - chunk_len, token_ids, table, is_prefill=True, do_sample=True)
    return SchedulerOutputs(1, [chunk], num_batched_tokens=chunk_len, num_prefill_tokens=chunk_len)
