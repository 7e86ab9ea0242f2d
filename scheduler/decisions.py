"""What a step decided, as a short digest to compare by and as a line to read."""

from array import array
from hashlib import blake2b

from scheduler.outputs import SchedulerOutputs, SequenceEnd
from scheduler.records import StepRecord

DIGEST_BYTES = 6
#: requests that a line names before it only counts them
MAX_NAMED = 4


class DecisionDigest:
    """Digests of steps in their order. Ends between two steps belong to the digest of the later one.

    Covers chunks with their blocks, swaps, copies, admissions, preemptions and ends. Costs in proportion to what the
    step schedules.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._ends: list[SequenceEnd] = []

    def note_ends(self, ends: list[SequenceEnd]) -> None:
        self._ends += ends

    def of_step(self, outputs: SchedulerOutputs, record: StepRecord) -> str:
        size = self._block_size
        numbers = array("q", [len(outputs.chunks)])
        for chunk in outputs.chunks:
            start, end, table = chunk.start, chunk.start + len(chunk.token_ids), chunk.block_table
            numbers.extend((chunk.seq_id, start, end, chunk.is_prefill * 2 + chunk.do_sample, len(table)))
            if end - start == 1:
                numbers.append(table[start // size])
            else:
                numbers.extend(table[start // size : (end - 1) // size + 1])
            if chunk.sample_indices is not None:
                numbers.extend(chunk.sample_indices)
        for pairs in (outputs.blocks_to_swap_out, outputs.blocks_to_swap_in, outputs.blocks_to_copy):
            numbers.append(len(pairs))
            for source, destination in pairs:
                numbers.extend((source, destination))
        digest = blake2b(numbers.tobytes(), digest_size=DIGEST_BYTES)
        names = [
            *((end.request_id, end.index, end.finish_reason) for end in self._ends + outputs.ended),
            *((p.victim, p.mode, p.reason, p.beneficiary) for p in record.preemptions),
            *record.admitted,
            *record.resumed,
        ]
        if names:
            digest.update(repr(names).encode())
        self._ends = []
        return digest.hexdigest()


def describe_step(outputs: SchedulerOutputs, record: StepRecord) -> str:
    """One line for people: who decodes, who prefills what, who is preempted."""
    parts: list[str] = []
    if record.prefill_chunks:
        chunks = [f"{chunk.request_id} {chunk.start}-{chunk.end}" for chunk in record.prefill_chunks]
        parts.append(f"prefill {_named(chunks)}")
    if record.num_decodes:
        parts.append(f"{record.num_decodes} decode{'s' if record.num_decodes > 1 else ''}")
    for preemption in record.preemptions:
        parts.append(f"preempt {preemption.victim} ({preemption.mode}) for {preemption.beneficiary}")
    if record.resumed:
        parts.append(f"resume {_named(record.resumed)}")
    if outputs.ended:
        parts.append(f"end {_named([f'{end.request_id} ({end.finish_reason})' for end in outputs.ended])}")
    return ", ".join(parts) or "nothing"


def _named(names: list[str]) -> str:
    rest = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {rest} more" if rest > 0 else "")
