"""What must hold after every call of `schedule`, whatever happened before."""

from kv_cache import BlockManager
from scheduler import Scheduler, SchedulerOutputs, SchedulerPolicy, SequenceGroup
from scheduler.records import StepRecord


class StepChecker:
    """Look at the scheduler `before` a step, then check the step."""

    def __init__(self, scheduler: Scheduler, blocks: BlockManager) -> None:
        self._scheduler = scheduler
        self._blocks = blocks
        self._decoding: list[SequenceGroup] = []
        self._outside: list[SequenceGroup] = []
        #: sequences that keep their slots, or are owed them together, where limits were lowered meanwhile
        self._num_owed_seqs = 0
        #: by victim, the urgent request that took its place and has not come in yet
        self._owed: dict[str, str] = {}

    def before(self) -> None:
        queues = self._scheduler.queues
        self._decoding = [group for group in queues.running if not group.is_prefilling]
        self._outside = [*queues.swapped, *queues.waiting]
        widths = [len(group.sequences) for group in [*queues.running, *self._outside]]
        self._num_owed_seqs = max([sum(group.num_seqs for group in queues.running), *widths])

    def check(self, outputs: SchedulerOutputs) -> None:
        record = self._scheduler.records.newest
        self._check_budget(outputs, record)
        self._check_tables(outputs)
        self._blocks.check_integrity()
        self._check_admissions(record, outputs)
        self._check_kinds(outputs, record)
        self._check_chunk_sizes(outputs, record)
        self._check_reasons(record)
        assert self._scheduler.num_empty_steps < 2

    def _check_budget(self, outputs: SchedulerOutputs, record: StepRecord) -> None:
        config = self._scheduler.config
        max_num_tokens = max(config.max_num_batched_tokens, self._num_owed_seqs)
        max_num_seqs = max(config.max_num_seqs, self._num_owed_seqs)
        sizes = [chunk.token_chunk_size for chunk in outputs.chunks]
        assert all(size > 0 for size in sizes)
        assert sum(sizes) == outputs.num_batched_tokens == record.num_batched_tokens
        assert outputs.num_batched_tokens <= max_num_tokens
        seq_ids = [chunk.seq_id for chunk in outputs.chunks]
        assert len(seq_ids) == len(set(seq_ids)), "a sequence runs twice in one step"
        assert len(seq_ids) <= max_num_seqs
        assert sum(group.num_seqs for group in self._scheduler.queues.running) <= max_num_seqs
        assert record.num_decodes + len(record.prefill_chunks) == len(outputs.chunks)

    def _check_tables(self, outputs: SchedulerOutputs) -> None:
        written: set[tuple[int, int]] = set()
        size = self._blocks.block_size
        for chunk in outputs.chunks:
            end = chunk.start + chunk.token_chunk_size
            assert len(chunk.block_table) * size >= end, "the table does not cover the chunk"
            for position in range(chunk.start, end):
                slot = (chunk.block_table[position // size], position % size)
                assert slot not in written, "two rows write one slot"
                written.add(slot)

    def _check_admissions(self, record: StepRecord, outputs: SchedulerOutputs) -> None:
        came_in = set(record.admitted) | set(record.resumed)
        assert not (outputs.blocks_to_swap_in and outputs.blocks_to_swap_out)
        if record.preemptions:
            assert not came_in, "a step that preempts admits nobody"
        queues = self._scheduler.queues
        admitted = [group for group in self._outside if group.request_id in came_in]
        victims = [*queues.swapped, *(group for group in queues.waiting if group.num_preemptions)]
        for group in admitted:
            for victim in victims:
                assert group.order < victim.order, "somebody passed a preempted group"
        outside = {group.request_id for group in [*queues.swapped, *queues.waiting]}
        for victim_id, urgent_id in self._owed.items():
            assert victim_id not in came_in or urgent_id not in outside, "a victim came back first"
        self._owed = {victim: urgent for victim, urgent in self._owed.items() if urgent in outside}
        self._owed |= {p.victim: p.beneficiary for p in record.preemptions if p.beneficiary in outside}

    def _check_kinds(self, outputs: SchedulerOutputs, record: StepRecord) -> None:
        kinds = {chunk.is_prefill for chunk in outputs.chunks}
        if self._scheduler.config.policy is SchedulerPolicy.DEFAULT:
            assert len(kinds) <= 1, "prefill and decode in one batch"
            return
        ran = {chunk.seq_id for chunk in outputs.chunks}
        excused = {preemption.victim for preemption in record.preemptions} | set(record.ended)
        for group in self._decoding:
            if group.request_id in excused or self._waits_for_steps_in_flight(group):
                continue
            for seq in group.live:
                last_one_in_flight = seq.num_pending_samples > 0 and (
                    seq.num_output_tokens + seq.num_pending_samples >= group.stop_rules.max_tokens
                    or seq.num_tokens + seq.num_pending_samples >= group.stop_rules.max_num_tokens
                )
                assert seq.seq_id in ran or last_one_in_flight, "a running answer got no token"

    def _waits_for_steps_in_flight(self, group: SequenceGroup) -> bool:
        """Its sequences are still to part or to be chosen, or it is alone and blocks are still to come back."""
        if not group.is_in_flight:
            return False
        return not group.is_forked or group.is_beam or len(self._scheduler.queues.running) == 1

    def _check_chunk_sizes(self, outputs: SchedulerOutputs, record: StepRecord) -> None:
        alignment = self._scheduler.config.chunk_alignment
        left = record.max_num_batched_tokens
        ends = {s.seq_id: s.prefill_end for group in self._scheduler.queues.running for s in group.live}
        for chunk in outputs.chunks:
            size = chunk.token_chunk_size
            if chunk.is_prefill and chunk.start + size < ends[chunk.seq_id]:
                assert size % alignment == 0 or (size == left and left < alignment)
            left -= size

    def _check_reasons(self, record: StepRecord) -> None:
        assert (record.waiting_reason is None) == (record.num_waiting == 0), record
        assert (record.swapped_reason is None) == (record.num_swapped == 0), record
