"""The plain loop that the engine is held against: Transformers alone, one sequence, one token at a time.

Owns the loop and its margins. Shares nothing with the engine but the sampler's scores, where a request is sampled
or penalized: it batches, chunks, pages and preempts nothing.
"""

from collections.abc import Callable
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


@torch.inference_mode()
def greedy_answer(
    model: torch.nn.Module, prompt_token_ids: list[int], num_tokens: int, scores: Scores | None = None
) -> ReferenceAnswer:
    """The `num_tokens` tokens that follow the prompt, end-of-sequence tokens taken like any other."""
    answer = ReferenceAnswer()
    cache = DynamicCache(config=model.config)
    input_ids = prompt_token_ids
    while len(answer.token_ids) < num_tokens:
        outputs = model(torch.tensor([input_ids]), cache=cache, use_cache=True, logits_to_keep=1)
        logits = outputs.logits[:, -1].float()
        if scores is not None:
            logits = scores(logits, answer.token_ids)
        best, second = logits[0].topk(2).values.tolist()
        token_id = int(logits[0].argmax())
        answer.token_ids.append(token_id)
        answer.margins.append(best - second)
        input_ids = [token_id]
    return answer


def chosen_answer(
    model: torch.nn.Module, prompt_token_ids: list[int], params: SamplingParams, sample_index: int = 0
) -> ReferenceAnswer:
    """The same for a request that is sampled or penalized: `params.max_tokens` tokens by its decision scores, of the
    sample with this index."""
    sampler = Sampler(model.config.vocab_size, (), "cpu")

    def scores(logits: torch.Tensor, output_token_ids: list[int]) -> torch.Tensor:
        position = len(prompt_token_ids) + len(output_token_ids)
        row = SampleRow(0, params, sample_index, position, prompt_token_ids, output_token_ids)
        return sampler.decision_scores(logits, [row])

    return greedy_answer(model, prompt_token_ids, params.max_tokens, scores)
