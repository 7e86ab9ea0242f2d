"""The scheduler: three queues of groups, one plan a step, and the only place where a group's state changes.

Reads no clock and draws no random number: time comes in as an argument, so a recorded run can be run again.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import replace

from kv_cache import BlockKey, BlockManager
from scheduler.admission import Admission
from scheduler.budget import SchedulingBudget
from scheduler.chunked_prefill import ChunkedPrefillPolicy
from scheduler.config import QueuePolicy, SchedulerConfig, SchedulerPolicy
from scheduler.costs import PreemptionCosts
from scheduler.default import DefaultPolicy
from scheduler.fairness import FairShare
from scheduler.governor import BudgetGovernor
from scheduler.limits import Allowance, StepLimits, check_limits, limits_of
from scheduler.outputs import SchedulerOutputs, SequenceEnd
from scheduler.preemption import Preemptor
from scheduler.queues import FairWaitingQueue, OrderedWaitingQueue, Queues
from scheduler.recording import Recorder
from scheduler.records import StepRecordRing, WaitReason
from scheduler.requests import Request, check_fits, make_group
from scheduler.sequence import Sequence, SequenceGroup, SequenceStatus
from scheduler.settle import Settlement
from scheduler.step import Step
from scheduler.urgency import Urgency

#: the tokens that one beam search goes on with, best first: (sequence id of the parent, token id)
BeamChoices = list[tuple[int, int]]


class SchedulerStuckError(RuntimeError):
    """Unfinished requests, and no step that would advance them: a fault of the scheduler, better loud than silent."""


class Scheduler:
    """`schedule` plans a step, `update` settles it. Several steps may be in flight, settled in order.

    Blocks of a sequence that ends are freed when the last step that reads them has been settled. A `recorder` is
    told of every call that changes anything.
    """

    def __init__(self, config: SchedulerConfig, blocks: BlockManager, recorder: Recorder | None = None) -> None:
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
        is_fair = config.queue_policy is QueuePolicy.FAIR
        self.config = config
        self._start_config = config
        self._allowance = Allowance()
        self.records = StepRecordRing(config.step_record_capacity)
        self.costs = PreemptionCosts()
        self.share = FairShare(config.tenant_weights) if is_fair else None
        self.queues = Queues(FairWaitingQueue(self.share) if self.share is not None else OrderedWaitingQueue())
        self._blocks = blocks
        self._recorder = recorder
        if recorder is not None:
            recorder.begin(config, blocks)
        self._settlement = Settlement(self.queues, blocks, self.share)
        preemptor = Preemptor(self.queues, blocks, config.preemption_mode, self.costs, victims_go_first=is_fair)
        admission = Admission(self.queues, blocks, config, self.costs, self.share)
        policy = ChunkedPrefillPolicy if config.policy is SchedulerPolicy.CHUNKED_PREFILL else DefaultPolicy
        self._policy = policy(self.queues, blocks, config, preemptor, admission)
        self._urgency: Urgency | None = None
        if config.queue_policy is QueuePolicy.PRIORITY:
            self._urgency = Urgency(self.queues, blocks, preemptor, config.max_num_seqs)
        self.governor: BudgetGovernor | None = None
        self._govern()
        self._groups: dict[str, SequenceGroup] = {}
        self._in_flight: deque[Step] = deque()
        self._last_end_s = -math.inf
        self._next_seq_id = 0
        self._next_step_id = 1
        self._next_arrival = 0
        #: blocks looked for and found in the prefix cache up to the last record
        self._num_blocks_queried = self._num_blocks_hit = 0
        #: steps in a row that ran nothing although something was unfinished and nothing was in flight
        self.num_empty_steps = 0

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> SequenceGroup:
        """Queue a request. Raises RequestTooLargeError for what could never run, whatever the others do."""
        assert request.request_id not in self._groups, f"request {request.request_id} is already here"
        if self._recorder is not None:
            self._recorder.add(request)
        check_fits(request, self.config, self._blocks)
        group = make_group(request, self.config, self._next_seq_id, self._next_arrival)
        self._next_seq_id += len(group.sequences)
        self._next_arrival += 1
        self._groups[request.request_id] = group
        self.queues.wait(group)
        return group

    def abort(self, request_id: str) -> list[SequenceEnd]:
        """Drop a request, wherever it is; returns what ended. Unknown and ended ones are left alone."""
        return self.end(request_id, SequenceStatus.FINISHED_ABORTED)

    def end(self, request_id: str, status: SequenceStatus) -> list[SequenceEnd]:
        """End all that is left of a request with `status`."""
        group = self._groups.get(request_id)
        if group is None:
            return []
        if self._recorder is not None:
            self._recorder.end(request_id, status)
        return self._end(group, list(group.sequences), status)

    def finish(self, request_id: str, index: int) -> list[SequenceEnd]:
        """One sample ended outside the engine (a stop string). Unknown and ended ones are left alone."""
        group = self._groups.get(request_id)
        if group is None or not group.is_forked:
            return []
        if self._recorder is not None:
            self._recorder.finish(request_id, index)
        return self._end(group, [group.sequences[index]], SequenceStatus.FINISHED_STOPPED)

    def set_rates(self, prefill_tokens_per_s: float, swap_blocks_per_s: float) -> None:
        """What the engine measured, for the choice between recompute and swap."""
        if self._recorder is not None:
            self._recorder.set_rates(prefill_tokens_per_s, swap_blocks_per_s)
        self.costs.prefill_tokens_per_s = prefill_tokens_per_s
        self.costs.swap_blocks_per_s = swap_blocks_per_s

    def check_limits(self, limits: StepLimits) -> None:
        """Raises `LimitError` for what cannot hold here. Any thread may ask."""
        check_limits(limits, self._start_config)

    def set_limits(self, limits: StepLimits) -> None:
        """Other limits from the next step on. Raises `LimitError` and changes nothing for what cannot hold here.

        Nobody loses a place: more running sequences than the new limit go on until enough of them have ended.
        """
        self.check_limits(limits)
        if self._recorder is not None:
            self._recorder.set_limits(limits)
        self.config = replace(
            self.config,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_num_seqs=limits.max_num_seqs,
            target_itl_ms=limits.target_itl_ms,
        )
        self._allowance.lower(limits, self._groups.values())
        if self._urgency is not None:
            self._urgency.max_num_seqs = limits.max_num_seqs
        self._govern()

    def _govern(self) -> None:
        """Whether there is a governor, and by what target, as the present limits say; what it learnt stays."""
        config = self.config
        if not config.target_itl_ms:
            self.governor = None
            return
        # An alignment over the budget would leave prompts one token a step.
        alignment = min(config.chunk_alignment, config.max_num_batched_tokens)
        if self.governor is None:
            self.governor = BudgetGovernor(config.target_itl_ms / 1000, alignment, config.min_prefill_tokens)
        else:
            self.governor.set_target(config.target_itl_ms / 1000, alignment)

    @property
    def limits(self) -> StepLimits:
        return limits_of(self.config)

    def has_unfinished(self) -> bool:
        return not self.queues.is_empty or bool(self._in_flight)

    def num_queued_tokens(self) -> int:
        """Prompt tokens that no step has taken yet, of waiting, swapped and mid-way groups."""
        midway = sum(group.num_uncomputed_tokens for group in self.queues.running if group.is_prefilling)
        return self.queues.num_queued_tokens + midway

    # -- steps ---------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> SchedulerOutputs:
        """Plan the next step at time `now` (seconds). An empty plan is not to be settled."""
        num_tokens, num_seqs = self._allowance.of_step(self.config, self.queues.running)
        if self.governor is not None:
            num_tokens = self.governor.budget(self.queues.running, num_tokens)
        budget = SchedulingBudget(num_tokens, num_seqs)
        step = Step(self._next_step_id, now, budget)
        self._next_step_id += 1
        if self._urgency is not None:
            self._urgency.make_room(step)
        self._policy.plan(step)
        for group in step.ended_groups:
            self._forget(group)
            self._settlement.free_settled(group.sequences)
        self._close(step)
        if self._recorder is not None:
            self._recorder.schedule(step.outputs, step.record)
        return step.outputs

    def update(
        self,
        step_id: int,
        samples: Mapping[int, list[int]],
        now: float,
        *,
        block_keys: Mapping[int, list[BlockKey]] | None = None,
        beams: Mapping[str, BeamChoices] | None = None,
    ) -> list[SequenceEnd]:
        """Settle the oldest step in flight: its tokens are computed, and `samples` (by sequence id) are appended.

        block_keys: by sequence id, names for the blocks that the samples complete. beams: by request id, what each
        beam search goes on with, in place of samples. Returns the sequences that ended.
        """
        step = self._in_flight.popleft()
        assert step.outputs.step_id == step_id, "steps are settled in the order in which they were planned"
        if self._recorder is not None:
            self._recorder.update(step, samples, now, block_keys or {}, beams or {}, self._groups)
        # One that was planned while another ran began when that one had ended.
        step.record.time_s = max(step.record.time_s, self._last_end_s)
        step.record.duration_s = now - step.record.time_s
        self._last_end_s = now
        if self.governor is not None:
            self.governor.settle(step, step.record.duration_s)
        ended = self._settlement.settle(step, samples, block_keys or {})
        for request_id, choices in (beams or {}).items():
            if request_id in self._groups:
                self._settlement.advance_beams(self._groups[request_id], choices)
        ends: list[SequenceEnd] = []
        for group, seq, status in ended:
            ends += self._end(group, [seq], status)
        self._settlement.release(step)
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
        counts = self._blocks.prefix_counts
        record.num_blocks_queried = counts.num_queried_blocks - self._num_blocks_queried
        record.num_blocks_hit = counts.num_hit_blocks - self._num_blocks_hit
        self._num_blocks_queried, self._num_blocks_hit = counts.num_queried_blocks, counts.num_hit_blocks
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
            self._settlement.depart(step)
            self._in_flight.append(step)
        self.records.append(record)

    # -- ends ----------------------------------------------------------------------------------------------------

    def _end(self, group: SequenceGroup, sequences: list[Sequence], status: SequenceStatus) -> list[SequenceEnd]:
        """End those of `sequences` that go on; with the last one the group leaves its queue and this scheduler."""
        ended = self._settlement.end(group, sequences, status)
        if ended and group.is_finished:
            self._forget(group)
        ends = [SequenceEnd(group.request_id, seq.index, status.value) for seq in ended]
        if self._recorder is not None:
            self._recorder.note_ends(ends)
            if not self.has_unfinished():
                self._recorder.flush()
        return ends

    def _forget(self, group: SequenceGroup) -> None:
        del self._groups[group.request_id]
        self._allowance.forget(group.request_id)
