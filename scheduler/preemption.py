"""Preemption: who gives up its blocks when a decode cannot grow, and where its cache goes."""

from kv_cache import BlockManager
from scheduler.config import PreemptionMode
from scheduler.queues import Queues
from scheduler.records import PreemptionRecord
from scheduler.sequence import SequenceGroup, SequenceStatus
from scheduler.step import Step

#: a victim should have advanced this many tokens since it came back, or the pool only thrashes
MIN_TOKENS_BETWEEN_PREEMPTIONS = 16


class Preemptor:
    """Takes victims from the tail of the running queue, by recompute or by swap."""

    def __init__(self, queues: Queues, blocks: BlockManager, mode: PreemptionMode) -> None:
        self._queues = queues
        self._blocks = blocks
        self._mode = mode

    def choose_victim(self, group: SequenceGroup) -> SequenceGroup:
        """The newest running group behind `group` that advanced since it came back, else the newest behind it,
        else `group` itself."""
        newest = group
        for candidate in self._queues.running.newest_first():
            if candidate is group:
                break
            if newest is group:
                newest = candidate
            if _has_advanced(candidate):
                return candidate
        return newest

    def preempt(self, victim: SequenceGroup, beneficiary: SequenceGroup, step: Step) -> None:
        """Take the victim's device blocks. Its cache moves to the host, or is thrown away and computed again."""
        self._queues.running.remove(victim)
        num_blocks = sum(self._blocks.num_held_blocks(seq.seq_id) for seq in victim.sequences)
        mode, reason = PreemptionMode.RECOMPUTE, "blocks"
        if self._mode is PreemptionMode.SWAP and any(seq.num_scheduled_tokens for seq in victim.sequences):
            if self._swap_out(victim, step):
                mode = PreemptionMode.SWAP
            else:
                reason = "host_pool_full"
        num_discarded = 0 if mode is PreemptionMode.SWAP else self._discard(victim)
        victim.num_preemptions += 1
        step.record.preemptions.append(
            PreemptionRecord(
                victim.request_id, mode.value, reason, beneficiary.request_id, num_blocks, num_discarded
            )
        )

    def _swap_out(self, victim: SequenceGroup, step: Step) -> bool:
        pairs = self._blocks.swap_out({seq.seq_id: seq.num_scheduled_tokens for seq in victim.sequences})
        if pairs is None:
            return False
        step.outputs.blocks_to_swap_out += pairs
        step.touched_groups.append(victim)
        victim.set_status(SequenceStatus.SWAPPED)
        self._queues.swapped.add(victim)
        return True

    def _discard(self, victim: SequenceGroup) -> int:
        """The blocks are free at once: a step still in flight that reads them ends before the next one writes."""
        num_discarded = 0
        for seq in victim.sequences:
            num_discarded += seq.discard_cache()
            self._blocks.free(seq.seq_id)
        victim.set_status(SequenceStatus.WAITING)
        self._queues.waiting.add(victim)
        return num_discarded


def _has_advanced(group: SequenceGroup) -> bool:
    if group.num_tokens_at_resume is None:
        return True
    return group.sequences[0].num_tokens - group.num_tokens_at_resume >= MIN_TOKENS_BETWEEN_PREEMPTIONS
