"""Prefill: the next chunk of a group that holds its blocks."""

from kv_cache import BlockManager
from scheduler.chunks import chunk_size
from scheduler.sequence import SequenceGroup
from scheduler.step import Step


def run_prefill(group: SequenceGroup, blocks: BlockManager, step: Step, alignment: int, *, whole: bool) -> None:
    """Schedule what the budget allows of the group's known tokens, one sequence after the other.

    A later sequence may share blocks that an earlier one fills, so none starts before those in front of it are
    done. whole: a sequence's tokens go in one chunk or wait.
    """
    for seq in group.live:
        num_left = seq.prefill_end - seq.num_scheduled_tokens
        if num_left <= 0:
            continue
        num_budget_tokens = step.budget.remaining_tokens
        size = num_left if whole else chunk_size(num_left, num_budget_tokens, alignment)
        if size == 0 or size > num_budget_tokens:
            return
        step.add_prefill(group, seq, size, blocks.block_table(seq.seq_id))
        if size < num_left:
            return
