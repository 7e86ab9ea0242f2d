"""Decodes: every running answer takes one token a step, oldest first."""

from kv_cache import BlockManager, BlockPairs
from scheduler.preemption import Preemptor
from scheduler.queues import Queues
from scheduler.sequence import Sequence, SequenceGroup, SequenceStatus, StopRules
from scheduler.step import Step


def run_decodes(
    decodes: list[SequenceGroup], queues: Queues, blocks: BlockManager, preemptor: Preemptor, step: Step
) -> None:
    """Schedule one token of each sequence of each group of `decodes` (in queue order).

    A group runs whole or not at all; for its slots, groups are preempted from the tail.
    """
    request_ids = step.record.decode_request_ids
    for group in decodes:
        if not group.is_forked or (group.is_beam and group.is_in_flight):
            continue  # its next tokens depend on those that are in flight
        if group.live[0].status is not SequenceStatus.RUNNING:
            continue  # preempted in this step for an older one
        sequences = group.live
        if sequences[0].num_pending_samples:
            sequences = [seq for seq in sequences if not _ends_with_pending(seq, group.stop_rules)]
        if sequences and _make_room(group, sequences, queues, blocks, preemptor, step):
            for seq in sequences:
                step.add_decode(group, seq, blocks.block_table(seq.seq_id))
                request_ids.append(group.request_id)


def _make_room(
    group: SequenceGroup,
    sequences: list[Sequence],
    queues: Queues,
    blocks: BlockManager,
    preemptor: Preemptor,
    step: Step,
) -> bool:
    """Get the slots of the next tokens; False if the group was preempted, has ended, or must wait for blocks."""
    while (copies := _append(sequences, blocks)) is None:
        victim = preemptor.choose_victim(group)
        if victim is group and len(queues.running) == 1:
            num_own_blocks = blocks.num_held_blocks([seq.seq_id for seq in group.live])
            if blocks.num_used_device_blocks == num_own_blocks and not group.is_in_flight:
                # The pool is full of this one: nothing will ever make room.
                queues.running.remove(group)
                step.end_group(group, SequenceStatus.FINISHED_LENGTH_CAPPED)
            return False  # else steps in flight bring its last tokens, or the blocks of groups that have ended
        preemptor.preempt(victim, group, step)
        if victim is group:
            return False
    if copies:
        step.outputs.blocks_to_copy += copies
    return True


def _append(sequences: list[Sequence], blocks: BlockManager) -> BlockPairs | None:
    if len(sequences) == 1:
        seq = sequences[0]
        return blocks.append_slots(seq.seq_id, seq.num_computed_tokens + seq.num_in_flight_tokens)
    return blocks.append_group_slots([(seq.seq_id, seq.num_scheduled_tokens) for seq in sequences])


def _ends_with_pending(seq: Sequence, rules: StopRules) -> bool:
    """Whether the tokens in flight are certain to be the last ones."""
    return seq.num_pending_samples > 0 and (
        seq.num_output_tokens + seq.num_pending_samples >= rules.max_tokens
        or seq.num_tokens + seq.num_pending_samples >= rules.max_num_tokens
    )
