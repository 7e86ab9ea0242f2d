"""A model made of integers behind the real sampler: what the next token can be is a hash of all that the block table
reads.

Owns the hash and the answers that follow from it. A token that is lost, doubled or computed over a wrong block
changes everything after it. Knows no engine and no time.
"""

import torch

from scheduler import SchedulerOutputs
from tests.integer_oracle.runner import IntegerRunner, slot_value, slots_of
from worker.sampled_rows import SampleRow
from worker.sampler import Sampler
from worker.types import SamplingParams

#: of the few tokens that may come next, most likely first; far enough apart that rounding decides nothing
_CANDIDATE_LOGITS = (10.0, 9.5, 9.0, 8.5)
_OTHER_LOGIT = -20.0


class PacedModel:
    """`letters`: the ids that answers are made of."""

    def __init__(self, vocab_size: int, letters: list[int]) -> None:
        assert len(letters) >= len(_CANDIDATE_LOGITS)
        self.vocab_size = vocab_size
        self._letters = torch.tensor(letters)
        self._offsets = torch.arange(len(_CANDIDATE_LOGITS))
        self._candidate_logits = torch.tensor(_CANDIDATE_LOGITS)

    def logits(self, rows: list[tuple[int, ...]]) -> torch.Tensor:
        """float32 [rows, vocabulary]; each row is what one block table reads."""
        first = torch.tensor([hash(slots) % len(self._letters) for slots in rows], dtype=torch.int64)
        places = (first[:, None] + self._offsets) % len(self._letters)
        logits = torch.full((len(rows), self.vocab_size), _OTHER_LOGIT)
        return logits.scatter_(1, self._letters[places], self._candidate_logits.expand(len(rows), -1))

    def answer(self, prompt_token_ids: list[int], params: SamplingParams, sample_index: int = 0) -> list[int]:
        """The `max_tokens` tokens that follow the prompt when nothing disturbs them."""
        sampler = Sampler(self.vocab_size, (), "cpu")
        slots = list(slots_of(prompt_token_ids))
        output: list[int] = []
        while len(output) < params.max_tokens:
            row = SampleRow(0, params, sample_index, len(slots), prompt_token_ids, output)
            (sampled,) = sampler.sample(self.logits([tuple(slots)]), [row])
            slots.append(slot_value(sampled.token_id, len(slots)))
            output.append(sampled.token_id)
        return output


class PacedCache:
    """Blocks of slots, in the place of `TensorPool`. The runner moves them itself, with what a step writes."""

    device = torch.device("cpu")
    num_block_bytes = 1

    def __init__(self, block_size: int, num_device_blocks: int, num_host_blocks: int) -> None:
        self.num_device_blocks = num_device_blocks
        self.num_host_blocks = num_host_blocks
        self.runner = IntegerRunner(block_size, num_device_blocks, num_host_blocks)

    def swap(self, out: list[tuple[int, int]], into: list[tuple[int, int]], copy: list[tuple[int, int]]) -> None:
        """Nothing: see above."""

    def time_swap_s(self, out: list[tuple[int, int]], into: list[tuple[int, int]], clock: object) -> float:
        return 0.0

    def read(self, outputs: SchedulerOutputs) -> list[tuple[int, ...]]:
        """Runs a step; what each row that samples reads, in their order."""
        read = self.runner.execute(outputs)
        return [read[chunk.seq_id] for chunk in outputs.chunks if chunk.do_sample]
