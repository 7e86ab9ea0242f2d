"""Admission: bringing swapped groups back and letting waiting ones in, in their shared order."""

from kv_cache import BlockManager
from scheduler.chunks import chunk_size
from scheduler.config import SchedulerConfig
from scheduler.queues import GroupQueue, Queues
from scheduler.records import WaitReason
from scheduler.sequence import SequenceGroup, SequenceStatus
from scheduler.step import Step


class Admission:
    """Moves groups into the running queue. Nobody passes a swapped or recomputed group that precedes it.

    The methods return None when the group was admitted or has ended, else the reason why it has to wait.
    """

    def __init__(self, queues: Queues, blocks: BlockManager, config: SchedulerConfig) -> None:
        self._queues = queues
        self._blocks = blocks
        self._config = config

    def swap_in_all(self, step: Step) -> None:
        """Resume swapped groups, oldest first, until one has to wait."""
        while (group := self._queues.swapped.head) is not None:
            reason = self._swap_in(group, step)
            if reason is not None:
                step.record.swapped_reason = reason
                return

    def _swap_in(self, group: SequenceGroup, step: Step) -> WaitReason | None:
        if group.num_steps_in_flight:
            return WaitReason.IN_FLIGHT
        if (recomputed := self._recomputed_before(group)) is not None:
            step.record.swapped_behind = recomputed.request_id
            return WaitReason.BEHIND_RECOMPUTED
        if (reason := self._gate(group, 1, step)) is not None:
            return reason
        seq = group.sequences[0]
        pairs = self._blocks.swap_in({seq.seq_id: seq.num_tokens})
        if pairs is None:
            return self._no_blocks(group, self._queues.swapped, step)
        step.outputs.blocks_to_swap_in += pairs
        self._queues.swapped.remove(group)
        self._start(group, step)
        step.record.resumed.append(group.request_id)
        table = self._blocks.block_table(seq.seq_id)
        if group.is_prefilling:
            step.add_prefill(group, seq, self._chunk(group.prefill_end - seq.num_scheduled_tokens, step), table)
        else:
            step.add_decode(group, seq, table)
        return None

    def _recomputed_before(self, group: SequenceGroup) -> SequenceGroup | None:
        for waiting in self._queues.waiting:
            if waiting.order > group.order:
                break
            if waiting.num_preemptions:
                return waiting
        return None

    def admit(self, group: SequenceGroup, step: Step, *, whole: bool, max_partial: int | None) -> WaitReason | None:
        """Let a waiting group in with its first chunk.

        whole: the chunk must be the whole known sequence. max_partial: how many more prompts may be left mid-way
        by this step (None: any number).
        """
        if group.num_steps_in_flight:
            return WaitReason.IN_FLIGHT
        swapped = self._queues.swapped.head
        if swapped is not None and swapped.order < group.order:
            step.record.waiting_behind = swapped.request_id
            return WaitReason.BEHIND_SWAPPED
        seq = group.sequences[0]
        num_tokens = seq.num_uncomputed_tokens
        if (reason := self._gate(group, num_tokens if whole else 1, step)) is not None:
            return reason
        size = num_tokens if whole else self._chunk(num_tokens, step)
        if size < num_tokens and max_partial is not None and max_partial < 1:
            return WaitReason.PARTIAL_PREFILL_CAP
        table = self._blocks.allocate(seq.seq_id, seq.num_tokens)
        if table is None:
            return self._no_blocks(group, self._queues.waiting, step)
        self._queues.waiting.remove(group)
        group.prefill_end = seq.num_tokens
        self._start(group, step)
        (step.record.resumed if group.num_preemptions else step.record.admitted).append(group.request_id)
        step.add_prefill(group, seq, size, table)
        return None

    def _chunk(self, num_tokens: int, step: Step) -> int:
        return chunk_size(num_tokens, step.budget.remaining_tokens, self._config.chunk_alignment)

    def _gate(self, group: SequenceGroup, num_tokens: int, step: Step) -> WaitReason | None:
        if step.budget.can_admit(num_tokens, group.num_seqs):
            return None
        if step.budget.remaining_tokens < num_tokens:
            return WaitReason.TOKEN_BUDGET
        return WaitReason.SEQUENCE_SLOTS

    def _no_blocks(self, group: SequenceGroup, queue: GroupQueue, step: Step) -> WaitReason | None:
        """Blocks were refused: the group waits, or ends if even an empty pool could not hold it."""
        num_tokens = group.sequences[0].num_tokens
        if self._blocks.can_ever_fit(num_tokens):
            return WaitReason.BLOCKS
        queue.remove(group)
        if any(seq.num_output_tokens for seq in group.sequences):
            # It outgrew the pool: undisturbed it would have ended at this very token.
            step.end_group(group, SequenceStatus.FINISHED_LENGTH_CAPPED)
        else:
            step.end_group(
                group,
                SequenceStatus.FINISHED_IGNORED,
                f"the prompt of {num_tokens} tokens needs {self._blocks.num_blocks_for(num_tokens)} cache blocks, "
                f"but there are {self._blocks.num_usable_device_blocks}",
            )
        return None

    def _start(self, group: SequenceGroup, step: Step) -> None:
        step.budget.add_seqs(group.num_seqs)
        group.set_status(SequenceStatus.RUNNING)
        if group.num_preemptions:
            group.num_tokens_at_resume = group.sequences[0].num_tokens
        self._queues.running.add(group)
