"""`Vocabulary`: all that a grammar needs of a tokenizer, as numbers and bytes that another process can be sent."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from worker.grammar.errors import GrammarError
from worker.text import Tokenizer


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """`token_bytes[i]` is what id i adds to a text, b"" for ids without a token; as long as the model's vocabulary.
    Text never matches `special_ids`. `encode` gives the tokens in which the tokenizer itself writes a text."""

    token_bytes: list[bytes]
    special_ids: list[int]
    eos_token_ids: list[int]
    encode: Callable[[str], list[int]]


def vocabulary_of(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]) -> Vocabulary:
    """Raises GrammarError for tokenizers whose tokens do not stand for fixed bytes, and without an end token."""
    if not tokenizer.has_fixed_bytes:
        raise GrammarError("this model's tokenizer cannot be held to a grammar: its tokens are no fixed bytes")
    ends = [token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size]
    if not ends:
        raise GrammarError("this model cannot be held to a grammar: it has no end-of-sequence token")
    token_bytes = [
        tokenizer.token_bytes(token_id) if tokenizer.has_token(token_id) else b"" for token_id in range(vocab_size)
    ]
    special_ids = sorted(token_id for token_id in {*tokenizer.special_ids, *ends} if token_id < vocab_size)
    return Vocabulary(token_bytes, special_ids, ends, tokenizer.encode_piece)
