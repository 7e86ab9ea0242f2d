"""One step in the making: what it may still spend, what it has decided, and why."""

from scheduler.budget import SchedulingBudget
from scheduler.outputs import PENDING_TOKEN_ID, ScheduledChunk, SchedulerOutputs, SequenceEnd
from scheduler.records import ChunkRecord, StepRecord
from scheduler.sequence import Sequence, SequenceGroup, SequenceStatus

#: (group, sequence, chunk size, the sequence's epoch, do_sample): what `update` needs to settle a row
Row = tuple[SequenceGroup, Sequence, int, int, bool]


class Step:
    """Policies fill it through these verbs, so budget, outputs and record never disagree."""

    __slots__ = ("budget", "ended_groups", "outputs", "record", "rows", "swapped_out")

    def __init__(self, step_id: int, now: float, budget: SchedulingBudget) -> None:
        self.budget = budget
        self.outputs = SchedulerOutputs(step_id)
        self.record = StepRecord(step_id, now, budget.max_num_batched_tokens)
        self.rows: list[Row] = []
        #: sequences whose blocks this step copies to the host
        self.swapped_out: list[tuple[SequenceGroup, Sequence]] = []
        self.ended_groups: list[SequenceGroup] = []

    @property
    def has_preempted(self) -> bool:
        return bool(self.record.preemptions)

    def add_decode(self, group: SequenceGroup, seq: Sequence, table: list[int]) -> None:
        """One row for the sequence's last known (or pending) token."""
        token_ids = seq.token_ids
        start = seq.num_computed_tokens + seq.num_in_flight_tokens
        token_id = token_ids[start] if start < len(token_ids) else PENDING_TOKEN_ID
        self.outputs.chunks.append(ScheduledChunk(group.request_id, seq.seq_id, start, [token_id], table, False, True))
        self.rows.append((group, seq, 1, seq.epoch, True))
        seq.num_in_flight_tokens += 1
        seq.num_pending_samples += 1
        self.budget.add_tokens(1)

    def add_prefill(self, group: SequenceGroup, seq: Sequence, size: int, table: list[int]) -> None:
        """A chunk of `size` known tokens; it samples if it completes them, for siblings to come as well."""
        start = seq.num_scheduled_tokens
        end = start + size
        do_sample = end == seq.num_tokens
        sample_indices = None if group.is_forked else [sibling.index for sibling in group.sequences]
        self.outputs.chunks.append(
            ScheduledChunk(
                group.request_id, seq.seq_id, start, seq.token_ids[start:end], table, True, do_sample, sample_indices
            )
        )
        self.rows.append((group, seq, size, seq.epoch, do_sample))
        seq.num_in_flight_tokens += size
        seq.num_pending_samples += do_sample
        group.num_steps_passed_over = 0
        self.budget.add_tokens(size)
        self.outputs.num_prefill_tokens += size
        completes = not group.is_prefilling
        self.record.prefill_chunks.append(ChunkRecord(group.request_id, seq.seq_id, start, end, completes))

    def end_group(self, group: SequenceGroup, status: SequenceStatus, error: str | None = None) -> None:
        """The group ends here. The caller has taken it out of its queue; its blocks go when the step is planned."""
        for seq in group.sequences:
            if not seq.status.is_finished:
                seq.status = status
                self.outputs.ended.append(SequenceEnd(group.request_id, seq.index, status.value, error))
        group.live.clear()
        self.ended_groups.append(group)
        self.record.ended.append(group.request_id)
