"""Policy `default`: whole prompts first, then decodes, then swapped answers. Never both kinds in one batch."""

from kv_cache import BlockManager
from scheduler.admission import Admission
from scheduler.config import SchedulerConfig
from scheduler.decode import run_decodes
from scheduler.preemption import Preemptor
from scheduler.prefill import run_prefill
from scheduler.queues import Queues
from scheduler.records import WaitReason
from scheduler.step import Step


class DefaultPolicy:
    """Prefill → decode → swap-in. A prompt runs whole or not at all; running sequences hold their slots first.

    A recomputed group of several sequences may take several steps, each sequence whole.
    """

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
        running = self._queues.running.snapshot()
        for group in running:
            step.budget.add_seqs(group.num_seqs)
        for group in running:
            run_prefill(group, self._blocks, step, self._config.chunk_alignment, whole=True)
        while not step.has_preempted and (head := self._queues.waiting.head) is not None:
            reason = self._admission.admit(head, step, whole=True, max_partial=None)
            if reason is not None:
                step.record.waiting_reason = reason
                break
        if step.outputs.chunks or step.record.resumed:
            if self._queues.swapped:
                step.record.swapped_reason = WaitReason.PREFILLS_FIRST
            return
        run_decodes(running, self._queues, self._blocks, self._preemptor, step)
        if not step.has_preempted:
            self._admission.swap_in_all(step)
