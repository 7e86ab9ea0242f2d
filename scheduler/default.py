"""Policy `default`: whole prompts first, then decodes, then swapped answers. Never both kinds in one batch."""

from kv_cache import BlockManager
from scheduler.admission import Admission
from scheduler.decode import run_decodes
from scheduler.preemption import Preemptor
from scheduler.queues import Queues
from scheduler.records import WaitReason
from scheduler.step import Step


class DefaultPolicy:
    """Prefill → decode → swap-in. A prompt runs whole or not at all; running sequences hold their slots first."""

    def __init__(self, queues: Queues, blocks: BlockManager, preemptor: Preemptor, admission: Admission) -> None:
        self._queues = queues
        self._blocks = blocks
        self._preemptor = preemptor
        self._admission = admission

    def plan(self, step: Step) -> None:
        running = self._queues.running.snapshot()
        for group in running:
            step.budget.add_seqs(group.num_seqs)
        while (head := self._queues.waiting.head) is not None:
            reason = self._admission.admit(head, step, whole=True, max_partial=None)
            if reason is not None:
                step.record.waiting_reason = reason
                break
        if step.outputs.chunks:
            if self._queues.swapped:
                step.record.swapped_reason = WaitReason.PREFILLS_FIRST
            return
        run_decodes(running, self._queues, self._blocks, self._preemptor, step)
        if not step.has_preempted:
            self._admission.swap_in_all(step)
