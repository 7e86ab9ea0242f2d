"""Policy `priority` at a full engine: an urgent request takes the place of running ones of a lower class."""

from kv_cache import BlockManager
from scheduler.preemption import Preemptor, may_be_preempted
from scheduler.queues import Queues
from scheduler.sequence import SequenceGroup
from scheduler.step import Step
from scheduler.tables import headroom, swap_requests, table_requests


class Urgency:
    """Makes room for the most urgent group that is not running; it comes in with the next step.

    Classes are compared strictly, so that two requests of one class never take turns in throwing each other out.
    """

    def __init__(self, queues: Queues, blocks: BlockManager, preemptor: Preemptor, max_num_seqs: int) -> None:
        self._queues = queues
        self._blocks = blocks
        self._preemptor = preemptor
        self.max_num_seqs = max_num_seqs

    def make_room(self, step: Step) -> None:
        """Preempt as many victims as the urgent group needs slots and blocks, or none if they would not do.

        It may come in with the step after one that preempts, when running answers have grown once more.
        """
        urgent = self._most_urgent()
        if urgent is None or urgent.is_in_flight:
            return
        candidates = [
            group
            for group in self._queues.running.newest_first()
            if group.priority > urgent.priority and group.order > urgent.order and may_be_preempted(group)
        ]
        if not candidates:
            return
        num_slots = self.max_num_seqs - sum(group.num_seqs for group in self._queues.running) - urgent.num_seqs
        num_blocks = self._blocks.num_admissible_device_blocks - self._num_wanted(urgent)
        num_blocks -= headroom(urgent, self._queues)
        if num_slots >= 0 and num_blocks >= self._growth(num_steps=1):
            return
        num_blocks -= self._growth(num_steps=2)
        victims: list[SequenceGroup] = []
        given_up: list[int] = []
        for group in candidates:
            victims.append(group)
            num_slots += group.num_seqs
            given_up += [seq.seq_id for seq in group.live]
            if num_slots >= 0 and num_blocks + self._blocks.num_freed_by(given_up) >= 0:
                break
        else:
            return
        for victim in victims:
            victim.waits_for = urgent
            self._preemptor.preempt(victim, urgent, step, reason="priority")

    def _most_urgent(self) -> SequenceGroup | None:
        heads = [head for head in (self._queues.waiting.head, self._queues.swapped.head) if head is not None]
        return min(heads, key=lambda group: group.order, default=None)

    def _num_wanted(self, urgent: SequenceGroup) -> int:
        if urgent is self._queues.swapped.head:
            return self._blocks.num_swapped_blocks_wanted(*swap_requests(urgent, self._blocks))
        requests, num_reserved = table_requests(urgent, self._blocks)
        return self._blocks.num_needed_blocks(requests) + num_reserved

    def _growth(self, *, num_steps: int) -> int:
        """Blocks that running answers may take in this step, or in this one and the next."""
        num_blocks = 0
        for group in self._queues.running:
            num_siblings = 1 if group.is_forked else group.num_seqs
            for seq in group.live:
                num_tokens = seq.num_scheduled_tokens + num_steps
                if seq.num_scheduled_tokens < seq.prefill_end:
                    # Its blocks are there already; only where this step completes it, the next one writes more.
                    num_tokens = seq.num_tokens + num_steps - 1
                num_blocks += num_siblings * self._blocks.num_missing_blocks(seq.seq_id, num_tokens)
        return num_blocks
