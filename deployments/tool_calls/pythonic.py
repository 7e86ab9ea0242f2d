"""Llama 4 and others: an answer that is a list of Python calls with keyword arguments, such as [f(a=1), g()]."""

import ast
import json
from collections.abc import Sequence
from typing import Any

from deployments.protocol.nesting import json_in_text
from deployments.protocol.tools import Function
from deployments.tool_calls.call_schemas import moved, parameters_of
from deployments.tool_calls.pieces import CallArguments, CallBegin, Content, Piece, ToolCallParser
from worker.grammar.specs import JSON_WHITESPACE, ebnf_grammar
from worker.types import GrammarSpec

#: models, and the grammar below, write JSON's names as well as Python's
_NAMES: dict[str, Any] = {"true": True, "false": False, "null": None}
#: an answer that could be calls is held back; what is longer is none
_MOST_HELD_CHARS = 64 * 1024


class PythonicFormat:
    name = "pythonic"
    shows_special_tokens = False

    def parser(self, tool_names: frozenset[str]) -> ToolCallParser:
        return _Parser(tool_names)

    def grammar(self, functions: Sequence[Function], *, is_parallel: bool) -> GrammarSpec:
        calls = " | ".join(f"call_{number}" for number in range(len(functions)))
        more = ' (", " call)*' if is_parallel else ""
        rules = [f'start: "[" call{more} "]"', f"call: {calls}"]
        for number, function in enumerate(functions):
            begin = json.dumps(_python_name(function.name) + "(")
            rules.append(f'call_{number}: {begin} {_arguments(function)} ")"')
        return ebnf_grammar("\n".join(rules) + "\n")

    def written(self, name: str, arguments: str) -> str:
        try:
            fields = ", ".join(f"{key}={value!r}" for key, value in json_in_text(arguments).items())
        except (ValueError, AttributeError):
            fields = arguments  # not an object: what a model once wrote, shown as it is
        return f"[{_python_name(name)}({fields})]"


class _Parser:
    """Calls are given whole, when the answer has ended: before that, nobody knows that it is one of calls."""

    def __init__(self, tool_names: frozenset[str]) -> None:
        self._tool_names = {_python_name(name): name for name in tool_names}
        self._held = ""
        self._is_text = False

    @property
    def num_whole_calls(self) -> int:
        return 0  # until the answer's end, when it is too late to ask

    def push(self, text: str) -> list[Piece]:
        if self._is_text:
            return [Content(text)] if text else []
        self._held += text
        begun = self._held.lstrip()
        if not begun or (begun.startswith("[") and len(begun) <= _MOST_HELD_CHARS):
            return []
        self._is_text = True
        return self._take_held()

    def flush(self) -> list[Piece]:
        calls = _calls_of(self._held.strip())
        if not calls or not {name for name, _ in calls} <= self._tool_names.keys():
            return self._take_held()
        self._held = ""
        return [
            piece
            for index, (name, arguments) in enumerate(calls)
            for piece in (CallBegin(index, self._tool_names[name]), CallArguments(index, arguments))
        ]

    def _take_held(self) -> list[Piece]:
        held, self._held = self._held, ""
        return [Content(held)] if held else []


def _python_name(name: str) -> str:
    """As a call in Python can be written; names of functions may hold dashes."""
    return name.replace("-", "_")


def _calls_of(text: str) -> list[tuple[str, str]] | None:
    """Names and arguments as JSON; None for what is no list of calls."""
    try:
        tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.List):
            return None
        return [_call(element) for element in tree.elts]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _call(node: ast.expr) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with keyword arguments")
    arguments = {keyword.arg: _value(keyword.value) for keyword in node.keywords}
    if None in arguments:
        raise ValueError("an argument without a name")
    return ast.unparse(node.func), json.dumps(arguments, ensure_ascii=False, allow_nan=False)


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(element) for element in node.elts]
    if isinstance(node, ast.Dict):
        if any(not isinstance(key, ast.Constant) or not isinstance(key.value, str) for key in node.keys):
            raise ValueError("a key that is no string")
        keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
        return dict(zip(keys, map(_value, node.values), strict=True))
    return ast.literal_eval(node)


def _arguments(function: Function) -> str:
    """Keyword arguments in the schema's order, required ones first, each other one or not."""
    schema = parameters_of(function)
    properties = schema.get("properties") or {}
    names = [name for name in properties if name.isidentifier()]
    required = [name for name in names if name in schema.get("required", [])]
    optional = [name for name in names if name not in required]
    written = {name: f"{json.dumps(name + '=')} %json {_property(schema, name)}" for name in names}
    if required:
        first = ' ", " '.join(written[name] for name in required)
        return first + "".join(f' (", " {written[name]})?' for name in optional)
    choices = [
        written[name] + "".join(f' (", " {written[later]})?' for later in optional[position + 1 :])
        for position, name in enumerate(optional)
    ]
    return f"({' | '.join(choices)})?" if choices else ""


def _property(schema: dict[str, Any], name: str) -> str:
    """The schema of one argument; what it refers to comes along, at a place where nothing else is."""
    rest = {"x-guidance": {"whitespace_pattern": JSON_WHITESPACE}, "$defs": {"all": moved(schema, "#/$defs/all")}}
    return json.dumps({"$ref": f"#/$defs/all/properties/{name}", **rest}, ensure_ascii=False)
