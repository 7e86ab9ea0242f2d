"""Mistral: after the control token [TOOL_CALLS] a list of JSON objects; or, in newer models, each call's name and,
after [ARGS], its arguments.
"""

from collections.abc import Sequence

from deployments.protocol.tools import Function
from deployments.tool_calls.call_schemas import call_schema, moved, parameters_of
from deployments.tool_calls.calls_in_text import CallsInText
from deployments.tool_calls.pieces import ToolCallParser
from worker.grammar.specs import TaggedJson, tagged_json_grammar
from worker.types import GrammarSpec

BEGIN = "[TOOL_CALLS]"
ARGUMENTS = "[ARGS]"
_MOST_PARALLEL_CALLS = 16


class MistralFormat:
    """`begin_token_id`, `arguments_token_id`: the ids of the marks where they are control tokens of the model.
    `has_names`: the model writes the newer form; both are read."""

    name = "mistral"

    def __init__(
        self, begin_token_id: int | None, arguments_token_id: int | None = None, *, has_names: bool = False
    ) -> None:
        self.shows_special_tokens = begin_token_id is not None or arguments_token_id is not None
        self._begin_token_id = begin_token_id
        self._arguments_token_id = arguments_token_id
        self._has_names = has_names

    def parser(self, tool_names: frozenset[str]) -> ToolCallParser:
        return CallsInText(BEGIN, "", "[],", ARGUMENTS)

    def grammar(self, functions: Sequence[Function], *, is_parallel: bool) -> GrammarSpec:
        if self._has_names:
            return tagged_json_grammar(list(map(self._named_call, functions)), "" if is_parallel else None)
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
        return tagged_json_grammar([TaggedJson(schema, special_token=_token(self._begin_token_id))])

    def written(self, name: str, arguments: str) -> str:
        if self._has_names:
            return f"{BEGIN}{name}{ARGUMENTS}{arguments}"
        return f'{BEGIN}[{{"name": "{name}", "arguments": {arguments}}}]'

    def _named_call(self, function: Function) -> TaggedJson:
        begin_id, arguments_id = self._begin_token_id, self._arguments_token_id
        return TaggedJson(
            parameters_of(function),
            begin=f"{BEGIN if begin_id is None else ''}{function.name}{ARGUMENTS if arguments_id is None else ''}",
            special_token="" if begin_id is None else _token(begin_id),
            json_token="" if arguments_id is None else _token(arguments_id),
        )


def _token(token_id: int) -> str:
    """As grammars name a control token."""
    return f"<[{token_id}]>"
