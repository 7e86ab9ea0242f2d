"""Prompts of a given length: random token ids, or random words. Equal seed and run, equal prompts.

Every run of a benchmark gets prompts of its own, so that a prefix cache cannot answer from the run before; the
blocks that a trace says are shared stay shared within a run.
"""

from dataclasses import dataclass
from random import Random

from deployments.bench.requests import PlannedRequest

#: where nothing is known of the vocabulary: every current model's is larger
FALLBACK_VOCAB_SIZE = 5000
#: each is a token of its own in the vocabularies of current models, so that words are as many tokens
_TEXT = (
    "the of and to in for is on that by this with you it not or be are from at as your all have new more an was we "
    "will can about if page my has search but our one other do no time they site he up may what which their news out "
    "use any there see only so his when here who also now help get view first am been would how were some these like "
    "than find price date back top people had list name just over state year day into two health world next used go "
    "work last most music buy data make them should product system city add number such please"
)
_WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True)
class PromptMaker:
    """Token ids come from the middle of the vocabulary: special tokens stand at its ends."""

    vocab_size: int
    seed: int
    prefix_block_tokens: int

    def token_ids(self, request: PlannedRequest, run: int) -> list[int]:
        token_ids: list[int] = []
        for key in request.prefix_keys:
            if len(token_ids) >= request.num_input_tokens:
                break
            token_ids += self._draw(f"prefix {self.seed} {run} {key}", self.prefix_block_tokens)
        missing = request.num_input_tokens - len(token_ids)
        if missing > 0:
            token_ids += self._draw(f"prompt {self.seed} {run} {request.number}", missing)
        return token_ids[: request.num_input_tokens]

    def text(self, request: PlannedRequest, run: int) -> str:
        """One common word for each token: the tokenizer decides how many tokens it is."""
        return " ".join(_WORDS[number % len(_WORDS)] for number in self.token_ids(request, run))

    def _draw(self, key: str, count: int) -> list[int]:
        margin = self.vocab_size // 10
        return Random(key).choices(range(margin, self.vocab_size - margin), k=count)
