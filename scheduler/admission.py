"""Admission: bringing swapped groups back and letting waiting ones in, in their shared order."""

from kv_cache import AllocStatus, BlockManager
from scheduler.config import SchedulerConfig
from scheduler.costs import PreemptionCosts
from scheduler.fairness import FairShare
from scheduler.prefill import run_prefill
from scheduler.queues import Queues
from scheduler.records import WaitReason
from scheduler.sequence import SequenceGroup, SequenceStatus
from scheduler.step import Step
from scheduler.tables import headroom, swap_requests, table_requests


class Admission:
    """Moves groups into the running queue. Nobody passes a swapped or recomputed group that precedes it.

    `swap_in` and `admit` return None when the group was admitted or has ended, else the reason why it has to wait.
    """

    def __init__(
        self,
        queues: Queues,
        blocks: BlockManager,
        config: SchedulerConfig,
        costs: PreemptionCosts,
        share: FairShare | None,
    ) -> None:
        self._queues = queues
        self._blocks = blocks
        self._config = config
        self._costs = costs
        self._share = share

    def swap_in_all(self, step: Step) -> None:
        """Resume swapped groups, oldest first, until one has to wait."""
        while (group := self._queues.swapped.head) is not None:
            reason = self._swap_in(group, step)
            if reason is not None:
                step.record.swapped_reason = reason
                return

    def _swap_in(self, group: SequenceGroup, step: Step) -> WaitReason | None:
        if group.is_in_flight:
            return WaitReason.IN_FLIGHT
        recomputed = self._queues.waiting.first_preempted
        if recomputed is not None and recomputed.order < group.order:
            step.record.swapped_behind = recomputed.request_id
            return WaitReason.BEHIND_RECOMPUTED
        if (urgent := group.urgent_before()) is not None:
            step.record.swapped_behind = urgent.request_id
            return WaitReason.PRIORITY
        if (reason := _gate(len(group.live), group, step)) is not None:
            return reason
        num_tokens, num_reserved = swap_requests(group, self._blocks)
        pairs = self._blocks.swap_in(num_tokens, num_reserved, headroom=headroom(group, self._queues))
        if pairs is None:
            num_blocks = self._blocks.num_swapped_blocks_wanted(num_tokens, num_reserved)
            if self._blocks.alloc_status(num_blocks) is not AllocStatus.NEVER:
                return WaitReason.BLOCKS
            self._queues.unpark(group)
            _end_for_lack_of_blocks(group, num_blocks, self._blocks, step)
            return None
        step.outputs.blocks_to_swap_in += pairs
        self._queues.unpark(group)
        self._start(group, step)
        step.record.resumed.append(group.request_id)
        self._run(group, step, whole=False)
        return None

    def admit(self, group: SequenceGroup, step: Step, *, whole: bool, max_partial: int | None) -> WaitReason | None:
        """Let a waiting group in with its first chunk.

        whole: each of its sequences must go in one chunk. max_partial: how many more prompts may be left mid-way
        by this step (None: any number).
        """
        if group.is_in_flight:
            return WaitReason.IN_FLIGHT
        swapped = self._queues.swapped.head
        if swapped is not None and swapped.order < group.order:
            step.record.waiting_behind = swapped.request_id
            return WaitReason.BEHIND_SWAPPED
        if (urgent := group.urgent_before()) is not None:
            step.record.waiting_behind = urgent.request_id
            return WaitReason.PRIORITY
        num_tokens = max(seq.num_tokens for seq in group.live) if whole else len(group.live)
        if (reason := _gate(num_tokens, group, step)) is not None:
            return reason
        if max_partial is not None and max_partial < 1 and group.num_uncomputed_tokens > step.budget.remaining_tokens:
            return WaitReason.PARTIAL_PREFILL_CAP
        requests, num_reserved = table_requests(group, self._blocks)
        num_cached = self._blocks.allocate(requests, num_reserved, headroom=headroom(group, self._queues))
        if num_cached is None:
            num_blocks = self._blocks.num_wanted_blocks(requests) + num_reserved
            if self._blocks.alloc_status(num_blocks) is not AllocStatus.NEVER:
                return WaitReason.BLOCKS
            self._queues.stop_waiting(group)
            _end_for_lack_of_blocks(group, num_blocks, self._blocks, step)
            return None
        self._queues.stop_waiting(group)
        for seq, request, cached in zip(group.live, requests, num_cached, strict=True):
            num_shared_tokens = request.num_shared_blocks * self._blocks.block_size
            seq.num_computed_tokens = max(cached, num_shared_tokens)
            seq.num_published_blocks = seq.num_computed_tokens // self._blocks.block_size
            seq.prefill_end = seq.num_tokens - (len(group.live) > 1)
        self._account(group, num_cached[0], step)
        self._start(group, step)
        self._run(group, step, whole=whole)
        return None

    def _account(self, group: SequenceGroup, num_cached_tokens: int, step: Step) -> None:
        """Remember what the cache gave, and charge a new prompt to its tenant."""
        if group.num_preemptions:
            step.record.resumed.append(group.request_id)
            self._costs.learn(group.num_findable_tokens, num_cached_tokens)
            return
        step.record.admitted.append(group.request_id)
        group.num_cached_tokens = num_cached_tokens
        if self._share is not None:
            self._share.charge_prefill(group.tenant, group.num_uncomputed_tokens)

    def _start(self, group: SequenceGroup, step: Step) -> None:
        step.budget.add_seqs(group.num_seqs)
        group.set_status(SequenceStatus.RUNNING)
        if group.num_preemptions:
            group.num_tokens_at_resume = group.live[0].num_tokens
        self._queues.running.add(group)

    def _run(self, group: SequenceGroup, step: Step, *, whole: bool) -> None:
        """The first chunk, or, where nothing is left to prefill, the next token of each sequence.

        A policy that runs prompts whole runs no decode beside them: it comes to that token in its next step.
        """
        if group.is_prefilling:
            run_prefill(group, self._blocks, step, self._config.chunk_alignment, whole=whole)
        elif not whole:
            self._decode(group, step)

    def _decode(self, group: SequenceGroup, step: Step) -> None:
        copies = self._blocks.append_group_slots([(seq.seq_id, seq.num_scheduled_tokens) for seq in group.live])
        assert copies is not None, "admission keeps the blocks of the first writes"
        step.outputs.blocks_to_copy += copies
        for seq in group.live:
            step.add_decode(group, seq, self._blocks.block_table(seq.seq_id))
            step.record.decode_request_ids.append(group.request_id)


def _gate(num_tokens: int, group: SequenceGroup, step: Step) -> WaitReason | None:
    if step.budget.can_admit(num_tokens, group.num_seqs):
        return None
    if step.budget.remaining_tokens < num_tokens:
        return WaitReason.TOKEN_BUDGET
    return WaitReason.SEQUENCE_SLOTS


def _end_for_lack_of_blocks(group: SequenceGroup, num_blocks: int, blocks: BlockManager, step: Step) -> None:
    """End a group that even an empty pool could not hold; the caller has taken it out of its queue."""
    if group.has_output:
        # It outgrew the pool: undisturbed it would have ended at this very token.
        step.end_group(group, SequenceStatus.FINISHED_LENGTH_CAPPED)
        return
    step.end_group(
        group,
        SequenceStatus.FINISHED_IGNORED,
        f"the request needs {num_blocks} cache blocks, but there are {blocks.num_usable_device_blocks}",
    )
