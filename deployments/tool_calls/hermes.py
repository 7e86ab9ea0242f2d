"""Hermes, Qwen and many others: JSON between <tool_call> tags."""

from collections.abc import Sequence

from deployments.protocol.tools import Function
from deployments.tool_calls.call_schemas import call_schema
from deployments.tool_calls.calls_in_text import CallsInText
from deployments.tool_calls.pieces import ToolCallParser
from worker.grammar.specs import TaggedJson, tagged_json_grammar
from worker.types import GrammarSpec

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesFormat:
    name = "hermes"

    def __init__(self, *, shows_special_tokens: bool = False) -> None:
        self.shows_special_tokens = shows_special_tokens

    def parser(self, tool_names: frozenset[str]) -> ToolCallParser:
        return CallsInText(BEGIN, END, "")

    def grammar(self, functions: Sequence[Function], *, is_parallel: bool) -> GrammarSpec:
        options = [
            TaggedJson(call_schema(function, "arguments"), begin=f"{BEGIN}\n", end=f"\n{END}") for function in functions
        ]
        return tagged_json_grammar(options, "\n" if is_parallel else None)

    def written(self, name: str, arguments: str) -> str:
        return f'{BEGIN}\n{{"name": "{name}", "arguments": {arguments}}}\n{END}'
