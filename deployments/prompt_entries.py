"""The tokens of a prompt with their log-probabilities, placed in the prompt's text. Knows neither HTTP nor JSON."""

from collections.abc import Collection
from dataclasses import dataclass

from worker.text import Detokenizer, Tokenizer
from worker.types import PromptTokenLogprobs


@dataclass(frozen=True, slots=True)
class PromptEntry:
    """`logprobs` is None for the first token, which nothing foretells; `text_offset` counts characters from the start
    of the prompt."""

    token_id: int
    logprobs: PromptTokenLogprobs | None
    text_offset: int


def prompt_text(tokenizer: Tokenizer, prompt: str | list[int]) -> str:
    """As it is echoed: every token that the client wrote, control tokens too."""
    return prompt if isinstance(prompt, str) else tokenizer.decode(prompt, skip_special_tokens=False)


def prompt_entries(
    tokenizer: Tokenizer, token_ids: list[int], logprobs: list[PromptTokenLogprobs], text: str
) -> list[PromptEntry]:
    """`logprobs` are of all tokens but the first; `text` is the prompt's, "" where nobody is shown it."""
    offsets = _offsets(tokenizer, token_ids, text)
    known = [None, *logprobs]
    return [PromptEntry(*entry) for entry in zip(token_ids, known, offsets, strict=True)]


def _offsets(tokenizer: Tokenizer, token_ids: list[int], text: str) -> list[int]:
    offsets, decoded = _decoded(tokenizer, token_ids)
    if decoded == text or not text:
        return offsets
    # The tokenizer added some (such as BOS), which are not in the text; or it changes texts, so that what it decodes is
    # another one than it was given.
    places = tokenizer.placed(text)
    offsets, decoded = _decoded(tokenizer, token_ids, {index for index, place in enumerate(places) if place.is_added})
    if decoded == text:
        return offsets
    starts: list[int] = []
    for place in places:
        before = starts[-1] if starts else 0
        starts.append(before if place.is_added else max(before, place.start))
    return starts


def _decoded(
    tokenizer: Tokenizer, token_ids: list[int], hidden: Collection[int] = ()
) -> tuple[list[int], str]:
    """(where each token begins, the text of all); what is `hidden`, by its index, takes no room."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    offsets: list[int] = []
    pieces: list[str] = []
    num_chars = 0
    for index, token_id in enumerate(token_ids):
        offsets.append(num_chars)
        if index not in hidden:
            pieces.append(detokenizer.push([token_id]))
            num_chars += len(pieces[-1])
    return offsets, "".join(pieces) + detokenizer.flush()
