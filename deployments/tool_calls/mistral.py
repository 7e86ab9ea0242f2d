"""Mistral: a list of JSON objects after the control token [TOOL_CALLS]."""

from collections.abc import Sequence

from deployments.protocol.tools import Function
from deployments.tool_calls.call_schemas import call_schema, moved
from deployments.tool_calls.calls_in_text import CallsInText
from deployments.tool_calls.pieces import ToolCallParser
from worker.grammar.specs import TaggedJson, tagged_json_grammar
from worker.types import GrammarSpec

BEGIN = "[TOOL_CALLS]"
_MOST_PARALLEL_CALLS = 16


class MistralFormat:
    """`begin_token_id`: the id of the mark where it is a control token of the model."""

    name = "mistral"

    def __init__(self, begin_token_id: int | None) -> None:
        self.shows_special_tokens = begin_token_id is not None
        self._begin_token_id = begin_token_id

    def parser(self, tool_names: frozenset[str]) -> ToolCallParser:
        return CallsInText(BEGIN, "", "[],")

    def grammar(self, functions: Sequence[Function], *, is_parallel: bool) -> GrammarSpec:
        schema = {
            "type": "array",
            "items": {
                "anyOf": [
                    moved(call_schema(function, "arguments"), f"#/items/anyOf/{number}")
                    for number, function in enumerate(functions)
                ]
            },
            "minItems": 1,
            "maxItems": _MOST_PARALLEL_CALLS if is_parallel else 1,
        }
        if self._begin_token_id is None:
            return tagged_json_grammar([TaggedJson(schema, begin=BEGIN)])
        return tagged_json_grammar([TaggedJson(schema, special_token=f"<[{self._begin_token_id}]>")])

    def written(self, name: str, arguments: str) -> str:
        return f'{BEGIN}[{{"name": "{name}", "arguments": {arguments}}}]'
