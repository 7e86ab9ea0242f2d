"""What a server says that it counted, and whether that can be: figures must not rest on counts that are impossible."""

from dataclasses import dataclass
from typing import Any

from deployments.bench.target import TargetError

#: no tokenizer makes that many tokens of a word, or adds that many to a prompt
_MOST_TOKENS_PER_WORD = 10
_MOST_ADDED_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Usage:
    num_input_tokens: int
    num_output_tokens: int


def read_usage(
    usage: Any, *, num_input_asked: int, num_output_asked: int, num_characters: int, num_deliveries: int
) -> Usage:
    """`num_input_asked` counts the words or token ids that were sent, `num_characters` those of the answer.

    Raises TargetError for what is no count, and for one that cannot be true: no token where some came, or more tokens
    than were asked for and than the answer has characters. An answer of another length than asked for can be.
    """
    counts = usage if isinstance(usage, dict) else {}
    num_input_tokens, num_output_tokens = (counts.get(name) for name in ("prompt_tokens", "completion_tokens"))
    most_input = _MOST_TOKENS_PER_WORD * num_input_asked + _MOST_ADDED_TOKENS
    return Usage(
        _count("prompt_tokens", num_input_tokens, 1, most_input),
        _count(
            "completion_tokens", num_output_tokens, min(num_deliveries, 1), max(num_output_asked, num_characters)
        ),
    )


def _count(name: str, value: Any, least: int, most: int) -> int:
    is_count = isinstance(value, int) and not isinstance(value, bool)
    if not is_count or not least <= value <= most:
        raise TargetError(f"usage cannot be true: {name} {_shown(value)}")
    return int(value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
