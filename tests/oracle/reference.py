"""The plain loop that the engine is held against: Transformers alone, one sequence, one token at a time, or a guess.

Owns the loop and its margins. Shares nothing with the engine but the sampler's scores, where a request is sampled
or penalized: it batches, chunks, pages and preempts nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from transformers import DynamicCache

from worker.sampled_rows import SampleRow
from worker.sampler import Sampler
from worker.types import SamplingParams

#: float32 logits [1, vocabulary], output so far → scores [1, vocabulary] whose argmax is the next token
Scores = Callable[[torch.Tensor, list[int]], torch.Tensor]


@dataclass(slots=True)
class ReferenceAnswer:
    """`margins[i]`: how far the score of `token_ids[i]` lay above the best other one when it was chosen."""

    token_ids: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)

    def choose(self, logits: torch.Tensor, scores: Scores | None) -> int:
        """Take the best token of `logits` [1, vocabulary]."""
        logits = logits.float()
        if scores is not None:
            logits = scores(logits, self.token_ids)
        best, second = logits[0].topk(2).values.tolist()
        token_id = int(logits[0].argmax())
        self.token_ids.append(token_id)
        self.margins.append(best - second)
        return token_id


@torch.inference_mode()
def greedy_answer(
    model: torch.nn.Module,
    prompt_token_ids: list[int],
    num_tokens: int,
    scores: Scores | None = None,
    guess: Sequence[int] = (),
) -> ReferenceAnswer:
    """The `num_tokens` tokens that follow the prompt, end-of-sequence tokens taken like any other.

    A `guess` saves time and decides nothing: it goes through the model behind the prompt, all at once, and the model
    says at each place what it would choose there. The first place where that is something else ends the use of it.
    """
    answer = ReferenceAnswer()
    if guess:
        guessed = list(guess[:num_tokens])
        input_ids = [*prompt_token_ids, *guessed[:-1]]
        for logits, token_id in zip(
            model(torch.tensor([input_ids]), logits_to_keep=len(guessed)).logits[0], guessed, strict=True
        ):
            if answer.choose(logits[None], scores) != token_id:
                break
    cache = DynamicCache(config=model.config)
    input_ids = [*prompt_token_ids, *answer.token_ids]
    while len(answer.token_ids) < num_tokens:
        outputs = model(torch.tensor([input_ids]), cache=cache, use_cache=True, logits_to_keep=1)
        input_ids = [answer.choose(outputs.logits[:, -1], scores)]
    return answer


def chosen_answer(
    model: torch.nn.Module,
    prompt_token_ids: list[int],
    params: SamplingParams,
    sample_index: int = 0,
    guess: Sequence[int] = (),
) -> ReferenceAnswer:
    """The same for a request that is sampled or penalized: `params.max_tokens` tokens by its decision scores, of the
    sample with this index."""
    sampler = Sampler(model.config.vocab_size, (), "cpu")

    def scores(logits: torch.Tensor, output_token_ids: list[int]) -> torch.Tensor:
        position = len(prompt_token_ids) + len(output_token_ids)
        row = SampleRow(0, params, sample_index, position, prompt_token_ids, output_token_ids)
        return sampler.decision_scores(logits, [row])

    return greedy_answer(model, prompt_token_ids, params.max_tokens, scores, guess)
