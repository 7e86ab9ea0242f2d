"""What an engine has done since it was made, in plain counts."""

from dataclasses import dataclass

from scheduler.records import StepRecord


@dataclass(slots=True)
class EngineTotals:
    num_steps: int = 0
    num_prefill_chunks: int = 0
    num_preemptions_recompute: int = 0
    num_preemptions_swap: int = 0
    num_blocks_swapped_out: int = 0
    num_blocks_swapped_in: int = 0
    num_discarded_tokens: int = 0
    num_blocks_queried: int = 0
    num_blocks_hit: int = 0

    def count(self, record: StepRecord) -> None:
        self.num_steps += 1
        self.num_prefill_chunks += len(record.prefill_chunks)
        self.num_blocks_swapped_out += record.num_blocks_swapped_out
        self.num_blocks_swapped_in += record.num_blocks_swapped_in
        self.num_blocks_queried += record.num_blocks_queried
        self.num_blocks_hit += record.num_blocks_hit
        for preemption in record.preemptions:
            self.num_preemptions_swap += preemption.mode == "swap"
            self.num_preemptions_recompute += preemption.mode == "recompute"
            self.num_discarded_tokens += preemption.num_discarded_tokens
