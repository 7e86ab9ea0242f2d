"""The one place that speaks to llguidance: vocabularies and grammars in its terms, its limits, its errors in ours."""

import json
from collections.abc import Callable

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from worker.grammar.errors import GrammarError
from worker.grammar.specs import JSON_WHITESPACE
from worker.types import GrammarSpec

#: what the library may spend on one grammar; the rest are its own defaults. A state of the lexer takes 1 to 2 kB.
MAX_LEXER_STATES = 50_000
_MAX_ERROR_CHARS = 200
_TOO_COSTLY = ("lexer error: too many", "parser error: Too many")
_JSON_OPTIONS = {"whitespace_pattern": JSON_WHITESPACE}


class _TokenBytes:
    """A tokenizer in the form that the library reads.

    Text that a grammar leaves no choice about is forced in the tokens that the tokenizer would write it in, since these
    are what the model knows; where they are not known, or do not spell the text, in the longest that fit.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self,
        token_bytes: list[bytes],
        special_ids: list[int],
        eos_token_ids: list[int],
        encode: Callable[[str], list[int]] | None,
    ) -> None:
        self.tokens = token_bytes
        self.special_token_ids = special_ids
        self.eos_token_id = eos_token_ids[0]
        self._encode = encode
        special = frozenset(special_ids)
        self._ids = {token: i for i, token in enumerate(token_bytes) if token and i not in special}
        self._longest = max(map(len, self._ids))

    def __call__(self, text: str | bytes) -> list[int]:
        spelled = text if isinstance(text, bytes) else text.encode()
        if self._encode is not None:
            found = self._encode(spelled.decode("utf-8", "replace"))
            pieces = [self.tokens[token_id] for token_id in found]
            if b"".join(pieces) == spelled and all(piece in self._ids for piece in pieces):
                return [self._ids[piece] for piece in pieces]
        return self._longest_first(spelled)

    def _longest_first(self, text: bytes) -> list[int]:
        found: list[int] = []
        start = 0
        while start < len(text):
            lengths = range(min(self._longest, len(text) - start), 0, -1)
            length = next((length for length in lengths if text[start : start + length] in self._ids), None)
            if length is None:
                return found  # a byte without a token ends what can be forced
            found.append(self._ids[text[start : start + length]])
            start += length
        return found


def library_tokenizer(
    token_bytes: list[bytes],
    special_ids: list[int],
    eos_token_ids: list[int],
    encode: Callable[[str], list[int]] | None = None,
) -> LLTokenizer:
    """`encode` gives the ids of a text that stands by itself, without tokens of control around it."""
    wrapper = _TokenBytes(token_bytes, special_ids, eos_token_ids, encode)
    return LLTokenizer(wrapper, n_vocab=len(token_bytes), eos_token=list(eos_token_ids))


def library_grammar(spec: GrammarSpec) -> str:
    """The grammar in the library's terms, not compiled. Raises GrammarError for what can be told from its form."""
    try:
        if spec.kind == "json_object":
            return LLMatcher.grammar_from_json_schema({"type": "object"}, defaults=_JSON_OPTIONS)
        if spec.kind == "json_schema":
            return LLMatcher.grammar_from_json_schema(spec.text, defaults=_JSON_OPTIONS)
        if spec.kind == "choice":
            rules = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(spec.text))
            return LLMatcher.grammar_from_lark(f"start: {rules}")
        return grammar_from("regex" if spec.kind == "regex" else "ebnf", spec.text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(_short(str(error))) from error


def compile_grammar(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at its start, its first mask computed; copies of it are cheap. Raises GrammarError."""
    limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    check_matcher(matcher)
    matcher.compute_bitmask()
    check_matcher(matcher)
    return matcher


def check_matcher(matcher: LLMatcher) -> None:
    """The library keeps errors to itself: raises GrammarError where it has one."""
    if matcher.is_error():
        raise GrammarError(_short(matcher.get_error()))


def is_wrong_token(matcher: LLMatcher) -> bool:
    """Whether its error is that the grammar does not allow the token it was given."""
    error: str = matcher.get_error()
    return "doesn't satisfy the grammar" in error or error.startswith("parser stopped")


def _short(message: str) -> str:
    """The telling part of the library's message: its parsers of regular expressions put it last, the others first."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if not lines or lines[0].startswith("panic"):
        return "the grammar library failed on it"
    if lines[0].startswith(_TOO_COSTLY):
        return "to follow it takes more states, or more forced text at once, than the grammar library may make"
    if lines[0].startswith("NoExtension"):
        return "no text at all matches it"
    told = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    return told if len(told) <= _MAX_ERROR_CHARS else told[: _MAX_ERROR_CHARS - 1] + "…"
