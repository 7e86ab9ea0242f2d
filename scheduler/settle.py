"""Settling: what a step that has run means for its sequences and their blocks."""

from collections.abc import Mapping

from kv_cache import BlockKey, BlockManager
from scheduler.fairness import FairShare
from scheduler.queues import Queues
from scheduler.sequence import Sequence, SequenceGroup, SequenceStatus, StopRules
from scheduler.step import Step

Ended = tuple[SequenceGroup, Sequence, SequenceStatus]


class Settlement:
    """Turns scheduled tokens into computed ones, appends samples, parts siblings, and frees what has ended."""

    def __init__(self, queues: Queues, blocks: BlockManager, share: FairShare | None) -> None:
        self._queues = queues
        self._blocks = blocks
        self._share = share

    def depart(self, step: Step) -> None:
        """The step is on its way: its sequences keep their blocks until `release`."""
        for _, seq, _, _, _ in step.rows:
            seq.num_steps_in_flight += 1
        for _, seq in step.swapped_out:
            seq.num_steps_in_flight += 1

    def settle(
        self, step: Step, samples: Mapping[int, list[int]], block_keys: Mapping[int, list[BlockKey]]
    ) -> list[Ended]:
        """Count the step's tokens as computed and append its samples; returns the sequences that reach their end."""
        ended: list[Ended] = []
        for group, seq, size, epoch, do_sample in step.rows:
            if seq.epoch == epoch:
                seq.num_in_flight_tokens -= size
                seq.num_computed_tokens += size
                if len(seq.block_keys) > seq.num_published_blocks:
                    self._publish(seq)
            if not do_sample:
                continue
            seq.num_pending_samples -= 1
            if seq.status.is_finished:
                continue
            num_tokens = 1
            if group.is_forked and not group.is_beam:
                self._append(group, seq, samples[seq.seq_id], block_keys, ended)
            elif not group.is_beam:
                self._part(group)
                num_tokens = len(group.live)
                for sibling in group.live:
                    self._append(group, sibling, samples[sibling.seq_id], block_keys, ended)
            if self._share is not None:
                self._share.charge_decode(group.tenant, num_tokens)
        return ended

    def _append(
        self,
        group: SequenceGroup,
        seq: Sequence,
        token_ids: list[int],
        block_keys: Mapping[int, list[BlockKey]],
        ended: list[Ended],
    ) -> None:
        status = _append_tokens(seq, token_ids, group.stop_rules)
        if seq.seq_id in block_keys:
            seq.block_keys += block_keys[seq.seq_id]
        if status is not None:
            ended.append((group, seq, status))

    def _publish(self, seq: Sequence) -> None:
        """Blocks become findable once they lie wholly below the computed tokens."""
        if seq.status is not SequenceStatus.RUNNING:
            return
        end = min(seq.num_computed_tokens // self._blocks.block_size, len(seq.block_keys))
        first = seq.num_published_blocks
        if end > first:
            self._blocks.publish(seq.seq_id, first, seq.block_keys[first:end])
            seq.num_published_blocks = end

    def _part(self, group: SequenceGroup) -> None:
        """The prompt is computed: every sibling goes on with the same blocks and a first token of its own."""
        lead = group.live[0]
        for sibling in group.sequences:
            if sibling is not lead and not sibling.status.is_finished:
                self._blocks.fork(lead.seq_id, sibling.seq_id)
                sibling.start_from(lead)
                sibling.status = lead.status
                group.live.append(sibling)
        group.is_forked = True

    def advance_beams(self, group: SequenceGroup, choices: list[tuple[int, int]]) -> None:
        """Go on with `choices` (parent sequence id, token id), best first; beams without a child are dropped.

        Afterwards `group.live` holds the beams in the order of `choices`. Nothing of the group may be in flight
        but the step that is being settled.
        """
        by_id = {seq.seq_id: seq for seq in group.live}
        parents = {parent_id for parent_id, _ in choices}
        for seq in group.live:
            if seq.seq_id not in parents:
                self._blocks.free(seq.seq_id)
                seq.discard_cache()
        spare = [seq for seq in group.sequences if seq.seq_id not in parents]
        beams: list[Sequence] = []
        continued: list[tuple[Sequence, int]] = []
        for parent_id, token_id in choices:
            parent = by_id[parent_id]
            if any(seq is parent for seq, _ in continued):
                beam = spare.pop(0)
                self._blocks.fork(parent.seq_id, beam.seq_id)
                beam.start_from(parent)
                beam.status = parent.status
                beam.token_ids.append(token_id)
            else:
                beam = parent
                continued.append((parent, token_id))
            beams.append(beam)
        # Only now, so that no fork has copied a token that its sibling chose.
        for parent, token_id in continued:
            parent.token_ids.append(token_id)
        group.live[:] = beams
        group.is_forked = True

    def release(self, step: Step) -> None:
        """The step has ended: free the blocks of its sequences that have ended and are in no later step."""
        for _, seq, _, _, _ in step.rows:
            seq.num_steps_in_flight -= 1
            if seq.num_steps_in_flight == 0 and seq.status.is_finished:
                self._blocks.free(seq.seq_id)
        for _, seq in step.swapped_out:
            seq.num_steps_in_flight -= 1
            if seq.num_steps_in_flight == 0 and seq.status.is_finished:
                self._blocks.free(seq.seq_id)

    def free_settled(self, sequences: list[Sequence]) -> None:
        for seq in sequences:
            if seq.num_steps_in_flight == 0:
                self._blocks.free(seq.seq_id)

    def end(self, group: SequenceGroup, sequences: list[Sequence], status: SequenceStatus) -> list[Sequence]:
        """End those of `sequences` that go on; the group leaves its queue with the last one."""
        ended = [seq for seq in sequences if not seq.status.is_finished]
        if not ended:
            return []
        was = group.live[0].status
        starts_over = was is SequenceStatus.RUNNING and group.is_prefilling
        self._leave_queue(group, was)
        for seq in ended:
            seq.status = status
        self.free_settled(ended)
        group.live[:] = [seq for seq in group.live if seq not in ended]
        if group.live and starts_over:
            self._start_over(group)
        elif group.live:
            self._enter_queue(group, was)
        return ended

    def _leave_queue(self, group: SequenceGroup, status: SequenceStatus) -> None:
        if status is SequenceStatus.WAITING:
            self._queues.stop_waiting(group)
        elif status is SequenceStatus.SWAPPED:
            self._queues.unpark(group)
        else:
            self._queues.running.remove(group)
            if self._share is not None and group.is_prefilling and not group.num_preemptions:
                self._share.charge_prefill(group.tenant, -group.num_uncomputed_tokens)

    def _enter_queue(self, group: SequenceGroup, status: SequenceStatus) -> None:
        if status is SequenceStatus.WAITING:
            self._queues.wait(group)
        elif status is SequenceStatus.SWAPPED:
            self._queues.park(group)
        else:
            self._queues.running.add(group)

    def _start_over(self, group: SequenceGroup) -> None:
        """A sequence ended while the group was refilling blocks that the others may have counted on."""
        for seq in group.live:
            self._blocks.free(seq.seq_id)
            seq.discard_cache()
        group.set_status(SequenceStatus.WAITING)
        self._queues.wait(group)


def _append_tokens(seq: Sequence, token_ids: list[int], rules: StopRules) -> SequenceStatus | None:
    """Append sampled tokens up to the one that ends the sequence; return its end, if any."""
    for token_id in token_ids:
        seq.token_ids.append(token_id)
        num_output = len(seq.token_ids) - seq.num_prompt_tokens
        if token_id in rules.stop_token_ids and num_output > rules.min_tokens:
            return SequenceStatus.FINISHED_STOPPED
        if num_output >= rules.max_tokens or len(seq.token_ids) >= rules.max_num_tokens:
            return SequenceStatus.FINISHED_LENGTH_CAPPED
    return None
