"""Policy `priority` at a full engine: an urgent request takes the place of running ones of a lower class."""

from kv_cache import BlockManager
from scheduler.preemption import Preemptor, may_be_preempted
from scheduler.queues import Queues
from scheduler.sequence import SequenceGroup
from scheduler.step import Step
from scheduler.tables import swap_requests, table_requests


class Urgency:
    """Makes room for the most urgent group that is not running; it comes in with the next step.

    Classes are compared strictly, so that two requests of one class never take turns in throwing each other out.
    """

    def __init__(self, queues: Queues, blocks: BlockManager, preemptor: Preemptor, max_num_seqs: int) -> None:
        self._queues = queues
        self._blocks = blocks
        self._preemptor = preemptor
        self._max_num_seqs = max_num_seqs

    def make_room(self, step: Step) -> None:
        """Preempt as many victims as the urgent group needs slots and blocks, or none if they would not do."""
        urgent = self._most_urgent()
        if urgent is None or urgent.is_in_flight:
            return
        num_slots = self._max_num_seqs - sum(group.num_seqs for group in self._queues.running) - urgent.num_seqs
        num_blocks = self._blocks.num_admissible_device_blocks - self._num_wanted(urgent) - self._growth()
        victims: list[SequenceGroup] = []
        for group in self._queues.running.newest_first():
            if num_slots >= 0 and num_blocks >= 0:
                break
            if group.priority > urgent.priority and group.order > urgent.order and may_be_preempted(group):
                victims.append(group)
                num_slots += group.num_seqs
                num_blocks += self._blocks.num_held_blocks([seq.seq_id for seq in group.live])
        if num_slots >= 0 and num_blocks >= 0:
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

    def _growth(self) -> int:
        """Blocks that running answers may take in this step and the next one."""
        return sum(
            self._blocks.num_missing_blocks(seq.seq_id, seq.num_scheduled_tokens + 2)
            for group in self._queues.running
            if not group.is_prefilling
            for seq in group.live
        )
