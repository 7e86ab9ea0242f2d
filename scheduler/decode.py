"""Decodes: every running answer takes one token a step, oldest first."""

from kv_cache import BlockManager
from scheduler.preemption import Preemptor
from scheduler.queues import Queues
from scheduler.sequence import Sequence, SequenceGroup, SequenceStatus, StopRules
from scheduler.step import Step


def run_decodes(
    decodes: list[SequenceGroup], queues: Queues, blocks: BlockManager, preemptor: Preemptor, step: Step
) -> None:
    """Schedule one token of each group of `decodes` (in queue order), preempting from the tail for their slots."""
    for group in decodes:
        seq = group.sequences[0]
        if seq.status is not SequenceStatus.RUNNING:
            continue  # preempted in this step for an older one
        if seq.num_pending_samples and _ends_with_pending(seq, group.stop_rules):
            continue
        if _make_room(group, seq, queues, blocks, preemptor, step):
            step.add_decode(group, seq, blocks.block_table(seq.seq_id))


def _make_room(
    group: SequenceGroup,
    seq: Sequence,
    queues: Queues,
    blocks: BlockManager,
    preemptor: Preemptor,
    step: Step,
) -> bool:
    """Get the slot of the next token; False if the group was preempted, has ended, or must wait for blocks."""
    position = seq.num_computed_tokens + seq.num_in_flight_tokens
    while (copies := blocks.append_slots(seq.seq_id, position, position + 1)) is None:
        if len(queues.running) == 1:
            is_alone = blocks.num_used_device_blocks == blocks.num_held_blocks(seq.seq_id)
            if is_alone and not group.num_steps_in_flight:
                # The pool is full of this one: nothing will ever make room.
                queues.running.remove(group)
                step.end_group(group, SequenceStatus.FINISHED_LENGTH_CAPPED)
            return False  # else steps in flight bring its last token, or the blocks of groups that have ended
        victim = preemptor.choose_victim(group)
        preemptor.preempt(victim, group, step)
        if victim is group:
            return False
    step.outputs.blocks_to_copy += copies
    return True


def _ends_with_pending(seq: Sequence, rules: StopRules) -> bool:
    """Whether the tokens in flight are certain to be the last ones."""
    return (
        seq.num_output_tokens + seq.num_pending_samples >= rules.max_tokens
        or seq.num_tokens + seq.num_pending_samples >= rules.max_num_tokens
    )
