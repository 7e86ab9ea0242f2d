"""Policy `chunked_prefill`: decodes first, then swapped answers, then prompts in chunks of what the budget leaves."""

from itertools import islice

from kv_cache import BlockManager
from scheduler.admission import Admission
from scheduler.config import QueuePolicy, SchedulerConfig
from scheduler.decode import run_decodes
from scheduler.preemption import Preemptor
from scheduler.prefill import run_prefill
from scheduler.queues import Queues
from scheduler.records import WaitReason
from scheduler.sequence import SequenceGroup, SequenceStatus
from scheduler.step import Step

#: a long prompt lets shorter ones pass in at most this many steps between two of its own
MAX_STEPS_PASSED_OVER = 8
#: shorter prompts are looked for behind at most this many long ones
MAX_LONG_PROMPTS_PASSED = 64


class ChunkedPrefillPolicy:
    """Decode → swap-in → prompts that are mid-way → new prompts. A step that preempts admits nobody."""

    def __init__(
        self,
        queues: Queues,
        blocks: BlockManager,
        config: SchedulerConfig,
        preemptor: Preemptor,
        admission: Admission,
    ) -> None:
        self._queues = queues
        self._blocks = blocks
        self._config = config
        self._preemptor = preemptor
        self._admission = admission

    def plan(self, step: Step) -> None:
        decodes: list[SequenceGroup] = []
        midway: list[SequenceGroup] = []
        for group in self._queues.running:
            (midway if group.is_prefilling else decodes).append(group)
            step.budget.add_seqs(group.num_seqs)
        run_decodes(decodes, self._queues, self._blocks, self._preemptor, step)
        if not step.has_preempted:
            self._admission.swap_in_all(step)
        if self._config.long_prefill_threshold:
            self._run_prompts_shorter_first(midway, step)
        else:
            self._continue(midway, step)
            self._admit_in_order(step)

    def _run_prompts_shorter_first(self, midway: list[SequenceGroup], step: Step) -> None:
        """Long prompts take what shorter ones leave, but are not passed over many steps in a row."""
        num_before = step.outputs.num_prefill_tokens
        long = [group for group in midway if self._yields(group)]
        self._continue([group for group in midway if group not in long], step)
        long += self._admit_past_long(step)
        num_with_shorter = step.outputs.num_prefill_tokens
        self._continue([group for group in long if group in midway], step)
        self._admit_in_order(step)
        if long and num_before < num_with_shorter == step.outputs.num_prefill_tokens:
            # Shorter ones left nothing. The first of the long ones was passed; those behind it had no turn anyway.
            long[0].num_steps_passed_over += 1
            if self._queues.waiting.head is long[0] and step.record.waiting_reason is WaitReason.TOKEN_BUDGET:
                step.record.waiting_reason = WaitReason.LONG_PREFILL

    def _yields(self, group: SequenceGroup) -> bool:
        """Whether shorter prompts may go before this one. A recomputed group never yields its place."""
        return (
            group.live[0].num_tokens > self._config.long_prefill_threshold
            and group.num_steps_passed_over < MAX_STEPS_PASSED_OVER
            and not group.num_preemptions
        )

    def _continue(self, midway: list[SequenceGroup], step: Step) -> None:
        """The next chunk of prompts that hold their blocks already, oldest first; more urgent new ones go before."""
        for group in midway:
            if self._config.queue_policy is QueuePolicy.PRIORITY:
                self._admit_in_order(step, before=group)
            if group.live[0].status is SequenceStatus.RUNNING:  # not preempted in this step
                run_prefill(group, self._blocks, step, self._config.chunk_alignment, whole=False)

    def _admit_past_long(self, step: Step) -> list[SequenceGroup]:
        """Admit shorter prompts from behind long ones; return the long ones that were passed."""
        passed: list[SequenceGroup] = []
        waiting = self._queues.waiting
        while not step.has_preempted and len(passed) < MAX_LONG_PROMPTS_PASSED:
            group = next(islice(waiting, len(passed), None), None)
            if group is None:
                break
            if self._yields(group):
                passed.append(group)
            elif any(group.priority > long.priority for long in passed):
                break  # a short prompt is no reason to pass a more urgent one
            elif self._admission.admit(group, step, whole=False, max_partial=self._max_partial()) is not None:
                break
        return passed

    def _admit_in_order(self, step: Step, before: SequenceGroup | None = None) -> None:
        """Admit until somebody has to wait; with `before`, only those of a more urgent class than that group."""
        while not step.has_preempted and (group := self._queues.waiting.head) is not None:
            if before is not None and (group.priority >= before.priority or group.order > before.order):
                return
            reason = self._admission.admit(group, step, whole=False, max_partial=self._max_partial())
            if reason is not None:
                if before is None:
                    step.record.waiting_reason = reason
                return

    def _max_partial(self) -> int | None:
        """How many more prompts may be left mid-way by this step."""
        cap = self._config.max_num_partial_prefills
        return cap - sum(group.is_prefilling for group in self._queues.running) if cap else None
