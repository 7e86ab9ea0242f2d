"""The requests of a chaos run, and what each must answer.

Greedy and seeded, some with two answers. Knows no servers and no disturbances.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.chaos.client import Stream
from tests.oracle.compare import NEAR_TIE_MARGIN
from tests.paced_model import PacedModel
from tests.real_prompts import PASSAGES
from worker.text import Tokenizer
from worker.types import SamplingParams

MAX_PROMPT_TOKENS = 128
MAX_OUTPUT_TOKENS = 64

#: (prompt, parameters, sample) → how far each token of an undisturbed answer lay above the best other one
Margins = Callable[[list[int], SamplingParams, int], list[float]]


@dataclass(frozen=True)
class MixRequest:
    prompt_token_ids: list[int]
    params: SamplingParams

    def body(self, model: str) -> dict[str, Any]:
        """Log-probabilities are asked for since they name the tokens."""
        params = self.params
        return {
            "model": model,
            "prompt": self.prompt_token_ids,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "seed": params.seed,
            "n": params.n,
            "logprobs": 0,
            "ignore_eos": True,
        }


def mixed_requests(encode: Callable[[str], list[int]], count: int) -> list[MixRequest]:
    """Prompts of 8 to 128 tokens, all different, answers of 24 to 64; half are sampled, a fifth have two answers."""
    requests = []
    for number in range(count):
        text = f"{number}. " + "\n".join(PASSAGES[(number + place) % len(PASSAGES)] for place in range(2))
        num_prompt_tokens = 8 + (number * 37) % (MAX_PROMPT_TOKENS - 7)
        params = SamplingParams(
            max_tokens=24 + (number * 23) % (MAX_OUTPUT_TOKENS - 23),
            n=2 if number % 5 == 3 else 1,
            temperature=0.8 if number % 2 else 0.0,
            seed=number,
            logprobs=0,
            ignore_eos=True,
        )
        requests.append(MixRequest(encode(text)[:num_prompt_tokens], params))
    return requests


def paced_answers(model: PacedModel, tokenizer: Tokenizer, request: MixRequest) -> list[list[str]]:
    """The tokens of each choice, as a response names them."""
    answers = []
    for index in range(request.params.n):
        token_ids = model.answer(request.prompt_token_ids, request.params, index)
        answers.append([tokenizer.decode([token_id]) for token_id in token_ids])
    return answers


def tokens_of(stream: Stream) -> list[list[str]]:
    return [stream.choices[index].tokens for index in sorted(stream.choices)]


def is_whole(request: MixRequest, stream: Stream) -> bool:
    """All choices came to their end, with their text and their count."""
    params = request.params
    if not stream.is_done or sorted(stream.choices) != list(range(params.n)) or stream.usage is None:
        return False
    return (
        all(choice.finish_reason == "length" for choice in stream.choices.values())
        and all(len(choice.tokens) == params.max_tokens for choice in stream.choices.values())
        and stream.usage["completion_tokens"] == params.n * params.max_tokens
        and stream.usage["prompt_tokens"] == len(request.prompt_token_ids)
    )


def difference(
    request: MixRequest, expected: list[list[str]], got: list[list[str]], margins: Margins | None
) -> str | None:
    """None for equal answers, `near_tie` where rounding excuses each one's first difference, else `changed`."""
    found = None
    for index, (own_expected, own_got) in enumerate(zip(expected, got, strict=True)):
        if own_expected == own_got:
            continue
        places = [place for place, pair in enumerate(zip(own_expected, own_got, strict=False)) if pair[0] != pair[1]]
        if not places or margins is None:
            return "changed"
        if margins(request.prompt_token_ids, request.params, index)[places[0]] > NEAR_TIE_MARGIN:
            return "changed"
        found = "near_tie"
    return found
