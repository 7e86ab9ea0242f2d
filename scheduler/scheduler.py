"""The scheduler: three queues of groups, one plan a step, and the only place where a group's state changes.

Reads no clock and draws no random number: time comes in as an argument, so a recorded run can be run again.
"""

from collections import deque

from kv_cache import BlockManager
from scheduler.admission import Admission
from scheduler.budget import SchedulingBudget
from scheduler.chunked_prefill import ChunkedPrefillPolicy
from scheduler.config import SchedulerConfig, SchedulerPolicy
from scheduler.default import DefaultPolicy
from scheduler.outputs import SchedulerOutputs, SequenceEnd
from scheduler.preemption import Preemptor
from scheduler.queues import GroupQueue, Queues
from scheduler.records import StepRecordRing, WaitReason
from scheduler.sequence import Sequence, SequenceGroup, SequenceStatus, StopRules
from scheduler.step import Step


class RequestTooLargeError(ValueError):
    """The request can never run here; the message has both numbers."""


class SchedulerStuckError(RuntimeError):
    """Unfinished requests, and no step that would advance them: a fault of the scheduler, better loud than silent."""


class Scheduler:
    """`schedule` plans a step, `update` settles it. Several steps may be in flight, settled in order.

    Blocks of a group that ends are freed when the last step that reads them has been settled.
    """

    def __init__(self, config: SchedulerConfig, blocks: BlockManager) -> None:
        if config.policy is SchedulerPolicy.DEFAULT and config.max_num_batched_tokens < config.max_model_len:
            raise ValueError(
                f"policy default runs whole prompts: max_num_batched_tokens ({config.max_num_batched_tokens}) "
                f"must be at least max_model_len ({config.max_model_len})"
            )
        if config.max_num_seqs + config.min_prefill_tokens > config.max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs ({config.max_num_seqs}) + min_prefill_tokens ({config.min_prefill_tokens}) "
                f"must be at most max_num_batched_tokens ({config.max_num_batched_tokens})"
            )
        self.config = config
        self.queues = Queues()
        self.records = StepRecordRing(config.step_record_capacity)
        self._blocks = blocks
        preemptor = Preemptor(self.queues, blocks, config.preemption_mode)
        admission = Admission(self.queues, blocks, config)
        self._policy: ChunkedPrefillPolicy | DefaultPolicy
        if config.policy is SchedulerPolicy.CHUNKED_PREFILL:
            self._policy = ChunkedPrefillPolicy(self.queues, blocks, config, preemptor, admission)
        else:
            self._policy = DefaultPolicy(self.queues, blocks, preemptor, admission)
        self._groups: dict[str, SequenceGroup] = {}
        self._in_flight: deque[Step] = deque()
        self._next_seq_id = 0
        self._next_step_id = 1
        self._next_arrival = 0
        #: steps in a row that ran nothing although something was unfinished and nothing was in flight
        self.num_empty_steps = 0

    # -- requests ------------------------------------------------------------------------------------------------

    def add(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        stop_rules: StopRules,
        arrival_s: float,
        output_token_ids: list[int] | None = None,
    ) -> SequenceGroup:
        """Queue a request of one sequence; `output_token_ids` is what it has already produced elsewhere.

        Raises RequestTooLargeError for what could never run, whatever the others do.
        """
        assert request_id not in self._groups, f"request {request_id} is already here"
        assert prompt_token_ids
        token_ids = prompt_token_ids + (output_token_ids or [])
        self._check_fits(len(token_ids))
        seq = Sequence(self._next_seq_id, 0, token_ids, len(prompt_token_ids))
        self._next_seq_id += 1
        group = SequenceGroup(request_id, [seq], stop_rules, (0.0, self._next_arrival), arrival_s)
        self._next_arrival += 1
        self._groups[request_id] = group
        self.queues.waiting.add(group)
        return group

    def _check_fits(self, num_tokens: int) -> None:
        if num_tokens >= self.config.max_model_len:
            raise RequestTooLargeError(
                f"the prompt has {num_tokens} tokens; at most {self.config.max_model_len - 1} "
                f"leave room for an answer in the context of {self.config.max_model_len}"
            )
        if not self._blocks.can_ever_fit(num_tokens):
            raise RequestTooLargeError(
                f"the prompt of {num_tokens} tokens needs {self._blocks.num_blocks_for(num_tokens)} cache blocks; "
                f"there are {self._blocks.num_usable_device_blocks}"
            )

    def abort(self, request_id: str) -> list[SequenceEnd]:
        """Drop a request, wherever it is; returns what ended. Unknown and ended ones are left alone."""
        group = self._groups.get(request_id)
        return self._end(group, group.sequences, SequenceStatus.FINISHED_ABORTED) if group is not None else []

    def finish(self, request_id: str, index: int) -> list[SequenceEnd]:
        """One sample ended outside the engine (a stop string). Unknown and ended ones are left alone."""
        group = self._groups.get(request_id)
        if group is None:
            return []
        ended = [seq for seq in group.sequences if seq.index == index]
        return self._end(group, ended, SequenceStatus.FINISHED_STOPPED)

    def has_unfinished(self) -> bool:
        return not self.queues.is_empty or bool(self._in_flight)

    def num_queued_tokens(self) -> int:
        """Prompt tokens that no step has taken yet, of waiting, swapped and mid-way groups."""
        queues = self.queues
        midway = sum(group.num_uncomputed_tokens for group in queues.running if group.is_prefilling)
        return queues.waiting.num_uncomputed_tokens + queues.swapped.num_uncomputed_tokens + midway

    # -- steps ---------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> SchedulerOutputs:
        """Plan the next step at time `now` (seconds). An empty plan is not to be settled."""
        budget = SchedulingBudget(self.config.max_num_batched_tokens, self.config.max_num_seqs)
        step = Step(self._next_step_id, now, budget)
        self._next_step_id += 1
        self._policy.plan(step)
        for group in step.ended_groups:
            self._forget(group)
        self._close(step)
        return step.outputs

    def update(self, step_id: int, samples: dict[int, list[int]], now: float) -> list[SequenceEnd]:
        """Settle the oldest step in flight: its tokens are computed, and `samples` (by sequence id) are appended.

        Returns the sequences that ended.
        """
        step = self._in_flight.popleft()
        assert step.outputs.step_id == step_id, "steps are settled in the order in which they were planned"
        step.record.duration_s = now - step.record.time_s
        ends: list[SequenceEnd] = []
        for group, seq, size, epoch, do_sample in step.rows:
            if seq.epoch == epoch:
                seq.num_in_flight_tokens -= size
                seq.num_computed_tokens += size
            if do_sample:
                seq.num_pending_samples -= 1
                if not seq.status.is_finished:
                    status = _append(seq, samples[seq.seq_id], group.stop_rules)
                    if status is not None:
                        ends += self._end(group, [seq], status)
        for group in step.touched_groups:
            group.num_steps_in_flight -= 1
            is_gone = self._groups.get(group.request_id) is not group
            if is_gone and group.num_steps_in_flight == 0:
                self._free(group)
        return ends

    def _close(self, step: Step) -> None:
        """Count what was planned, put it in flight, and write its record."""
        outputs, record = step.outputs, step.record
        outputs.num_batched_tokens = record.num_batched_tokens = step.budget.num_batched_tokens
        record.num_prefill_tokens = outputs.num_prefill_tokens
        record.num_decodes = len(record.decode_request_ids)
        record.num_blocks_swapped_out = len(outputs.blocks_to_swap_out)
        record.num_blocks_swapped_in = len(outputs.blocks_to_swap_in)
        record.num_blocks_copied = len(outputs.blocks_to_copy)
        record.num_waiting = len(self.queues.waiting)
        record.num_running = len(self.queues.running)
        record.num_swapped = len(self.queues.swapped)
        record.num_device_blocks_used = self._blocks.num_used_device_blocks
        record.num_host_blocks_used = self._blocks.num_used_host_blocks
        if record.preemptions:
            # Nobody was let in, and the victims came into the queues after they had been looked at.
            record.waiting_reason = WaitReason.PREEMPTION if record.num_waiting else None
            record.swapped_reason = WaitReason.PREEMPTION if record.num_swapped else None
        if outputs.is_empty:
            record.duration_s = 0.0
            is_stuck = not self._in_flight and not self.queues.is_empty and not outputs.ended
            self.num_empty_steps = self.num_empty_steps + 1 if is_stuck else 0
            if self.num_empty_steps > 1:
                raise SchedulerStuckError(f"two steps in a row ran nothing; the last one: {record}")
        else:
            self.num_empty_steps = 0
            for group in step.touched_groups:
                group.num_steps_in_flight += 1
            self._in_flight.append(step)
        self.records.append(record)

    # -- ends ----------------------------------------------------------------------------------------------------

    def _end(
        self, group: SequenceGroup, sequences: list[Sequence], status: SequenceStatus
    ) -> list[SequenceEnd]:
        """End those of `sequences` that go on; with the last one the group leaves its queue and this scheduler."""
        queue = self._queue_of(group)
        ends: list[SequenceEnd] = []
        for seq in sequences:
            if not seq.status.is_finished:
                seq.status = status
                ends.append(SequenceEnd(group.request_id, seq.index, status.value))
        if group.is_finished:
            queue.remove(group)
            self._forget(group)
        return ends

    def _queue_of(self, group: SequenceGroup) -> GroupQueue:
        status = next(seq.status for seq in group.sequences if not seq.status.is_finished)
        if status is SequenceStatus.WAITING:
            return self.queues.waiting
        return self.queues.running if status is SequenceStatus.RUNNING else self.queues.swapped

    def _forget(self, group: SequenceGroup) -> None:
        del self._groups[group.request_id]
        if group.num_steps_in_flight == 0:
            self._free(group)

    def _free(self, group: SequenceGroup) -> None:
        for seq in group.sequences:
            self._blocks.free(seq.seq_id)


def _append(seq: Sequence, token_ids: list[int], rules: StopRules) -> SequenceStatus | None:
    """Append sampled tokens up to the one that ends the sequence; return its end, if any."""
    for token_id in token_ids:
        seq.token_ids.append(token_id)
        num_output = len(seq.token_ids) - seq.num_prompt_tokens
        if token_id in rules.stop_token_ids and num_output > rules.min_tokens:
            return SequenceStatus.FINISHED_STOPPED
        if num_output >= rules.max_tokens or len(seq.token_ids) >= rules.max_num_tokens:
            return SequenceStatus.FINISHED_LENGTH_CAPPED
    return None
