"""Llama 3: an answer that is nothing but JSON objects, perhaps after the control token <|python_tag|>."""

from collections.abc import Sequence

from deployments.protocol.tools import Function
from deployments.tool_calls.call_schemas import call_schema
from deployments.tool_calls.calls_in_text import CallsInText
from deployments.tool_calls.pieces import Content, Piece, ToolCallParser
from worker.grammar.specs import TaggedJson, tagged_json_grammar
from worker.types import GrammarSpec

MARK = "<|python_tag|>"


class Llama3JsonFormat:
    name = "llama3_json"

    def __init__(self, *, shows_special_tokens: bool) -> None:
        self.shows_special_tokens = shows_special_tokens

    def parser(self, tool_names: frozenset[str]) -> ToolCallParser:
        return _Parser()

    def grammar(self, functions: Sequence[Function], *, is_parallel: bool) -> GrammarSpec:
        options = [TaggedJson(call_schema(function, "parameters")) for function in functions]
        return tagged_json_grammar(options, "; " if is_parallel else None)

    def written(self, name: str, arguments: str) -> str:
        return f'{{"name": "{name}", "parameters": {arguments}}}'


class _Parser:
    """Whether the answer is calls is known from its first character, or from the mark."""

    def __init__(self) -> None:
        self._held = ""
        self._calls: CallsInText | None = None
        self._is_text = False

    @property
    def num_whole_calls(self) -> int:
        return 0 if self._calls is None else self._calls.num_whole_calls

    def push(self, text: str) -> list[Piece]:
        if self._calls is not None:
            return self._calls.push(text)
        if self._is_text:
            return [Content(text)] if text else []
        self._held += text
        begun = self._held.lstrip()
        if not begun or (begun != MARK and MARK.startswith(begun)):
            return []
        held, self._held = self._held, ""
        if begun.startswith((MARK, "{")):
            self._calls = CallsInText(MARK, "", ";")
            return self._calls.push(MARK + begun.removeprefix(MARK))
        self._is_text = True
        return [Content(held)]

    def flush(self) -> list[Piece]:
        if self._calls is not None:
            return self._calls.flush()
        held, self._held = self._held, ""
        return [Content(held)] if held else []
