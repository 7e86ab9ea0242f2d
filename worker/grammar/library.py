"""The one place that speaks to llguidance: vocabularies and grammars in its terms, its limits, its errors in ours."""

import json

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from worker.grammar.errors import GrammarError
from worker.grammar.specs import JSON_WHITESPACE
from worker.types import GrammarSpec

#: what the library may spend on one grammar; the rest are its own defaults. A state of the lexer takes 1 to 2 kB.
MAX_LEXER_STATES = 50_000
_MAX_ERROR_CHARS = 200
_JSON_OPTIONS = {"whitespace_pattern": JSON_WHITESPACE}


class _TokenBytes:
    """A tokenizer in the form that the library reads; it has no use for encoding text."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, token_bytes: list[bytes], special_ids: list[int], eos_token_ids: list[int]) -> None:
        self.tokens = token_bytes
        self.special_token_ids = special_ids
        self.eos_token_id = eos_token_ids[0]

    def __call__(self, text: str) -> list[int]:
        return []


def library_tokenizer(token_bytes: list[bytes], special_ids: list[int], eos_token_ids: list[int]) -> LLTokenizer:
    wrapper = _TokenBytes(token_bytes, special_ids, eos_token_ids)
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


def _short(message: str) -> str:
    """The telling part of the library's message: its parsers of regular expressions put it last, the others first."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if not lines or lines[0].startswith("panic"):
        return "the grammar library failed on it"
    if lines[0].startswith("NoExtension"):
        return "no text at all matches it"
    told = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    return told if len(told) <= _MAX_ERROR_CHARS else told[: _MAX_ERROR_CHARS - 1] + "…"
