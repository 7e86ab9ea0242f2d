"""The tokens of a prompt with their log-probabilities, placed in the prompt's text. Knows neither HTTP nor JSON."""

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


def prompt_entries(
    tokenizer: Tokenizer, token_ids: list[int], logprobs: list[PromptTokenLogprobs], *, skip_special_tokens: bool
) -> list[PromptEntry]:
    """`logprobs` are of all tokens but the first."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens)
    entries: list[PromptEntry] = []
    num_chars = 0
    for token_id, known in zip(token_ids, [None, *logprobs], strict=True):
        entries.append(PromptEntry(token_id, known, num_chars))
        num_chars += len(detokenizer.push([token_id]))
    return entries
