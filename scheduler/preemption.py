"""Preemption: who gives up its blocks when somebody else needs them, and where its cache goes."""

from kv_cache import BlockManager
from scheduler.config import PreemptionMode
from scheduler.costs import PreemptionCosts
from scheduler.queues import Queues
from scheduler.records import PreemptionRecord
from scheduler.sequence import SequenceGroup, SequenceStatus
from scheduler.step import Step

#: a victim should have advanced this many tokens since it came back, or the pool only thrashes
MIN_TOKENS_BETWEEN_PREEMPTIONS = 16
#: the policy key of preempted groups under `fair`: they have had their turn and go before new ones
BEFORE_NEW_GROUPS = -1.0


class Preemptor:
    """Takes victims from the tail of the running queue: lowest class, then newest."""

    def __init__(
        self,
        queues: Queues,
        blocks: BlockManager,
        mode: PreemptionMode,
        costs: PreemptionCosts,
        *,
        victims_go_first: bool,
    ) -> None:
        self._queues = queues
        self._blocks = blocks
        self._mode = mode
        self._costs = costs
        self._victims_go_first = victims_go_first

    def choose_victim(self, group: SequenceGroup) -> SequenceGroup:
        """The newest running group behind `group` that advanced since it came back, else the newest behind it,
        else `group` itself."""
        newest = group
        for candidate in self._queues.running.newest_first():
            if candidate is group:
                break
            if not may_be_preempted(candidate):
                continue
            if newest is group:
                newest = candidate
            if _has_advanced(candidate):
                return candidate
        return newest

    def preempt(
        self, victim: SequenceGroup, beneficiary: SequenceGroup, step: Step, reason: str = "blocks"
    ) -> None:
        """Take the victim's device blocks. Its cache moves to the host, or is thrown away and computed again."""
        self._queues.running.remove(victim)
        record = PreemptionRecord(victim.request_id, "", reason, beneficiary.request_id, 0, 0, 0.0, 0.0)
        record.num_blocks = self._blocks.num_held_blocks([seq.seq_id for seq in victim.live])
        if self._victims_go_first:
            victim.order = (BEFORE_NEW_GROUPS, victim.order[1])
        wants_swap = self._prefers_swap(victim, record)
        if wants_swap and self._swap_out(victim, step):
            record.mode = PreemptionMode.SWAP.value
        else:
            record.mode = PreemptionMode.RECOMPUTE.value
            if wants_swap:
                record.reason = "host_pool_full"
            record.num_discarded_tokens = self._discard(victim)
        step.record.preemptions.append(record)

    def _prefers_swap(self, victim: SequenceGroup, record: PreemptionRecord) -> bool:
        if self._mode is PreemptionMode.RECOMPUTE or not any(seq.num_scheduled_tokens for seq in victim.live):
            return False
        if len(victim.live) > 1 and victim.is_prefilling:
            return False  # its sequences count on blocks that others of them have yet to fill
        if self._mode is PreemptionMode.SWAP:
            return True
        num_tokens = sum(seq.num_scheduled_tokens for seq in victim.live)
        num_findable = sum(seq.num_published_blocks for seq in victim.live) * self._blocks.block_size
        record.recompute_estimate_s = self._costs.recompute_s(num_tokens, num_findable)
        record.swap_estimate_s = self._costs.swap_s(record.num_blocks)
        return len(victim.live) > 1 or record.swap_estimate_s < record.recompute_estimate_s

    def _swap_out(self, victim: SequenceGroup, step: Step) -> bool:
        pairs = self._blocks.swap_out({seq.seq_id: seq.num_scheduled_tokens for seq in victim.live})
        if pairs is None:
            return False
        step.outputs.blocks_to_swap_out += pairs
        for seq in victim.live:
            seq.num_published_blocks = 0
            step.swapped_out.append((victim, seq))
        victim.num_preemptions += 1
        victim.set_status(SequenceStatus.SWAPPED)
        self._queues.park(victim)
        return True

    def _discard(self, victim: SequenceGroup) -> int:
        """The blocks are free at once: a step still in flight that reads them ends before the next one writes."""
        victim.num_findable_tokens = victim.live[0].num_published_blocks * self._blocks.block_size
        num_discarded = 0
        for seq in victim.live:
            num_discarded += seq.discard_cache()
            self._blocks.free(seq.seq_id)
        victim.num_preemptions += 1
        victim.set_status(SequenceStatus.WAITING)
        self._queues.wait(victim)
        return num_discarded


def may_be_preempted(group: SequenceGroup) -> bool:
    """Not while a step in flight decides which sequences there will be: it has to be settled first."""
    if group.is_beam:
        return not group.is_in_flight
    return group.is_forked or not group.live[0].num_pending_samples


def _has_advanced(group: SequenceGroup) -> bool:
    if group.num_tokens_at_resume is None:
        return True
    return group.live[0].num_tokens - group.num_tokens_at_resume >= MIN_TOKENS_BETWEEN_PREEMPTIONS
