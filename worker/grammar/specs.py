"""`GrammarSpec`s from what clients write, tool calls among them. Owns how each kind is written."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from worker.types import GrammarSpec

#: White space that JSON may have between its parts: a line break and an indentation, or a few blanks. A grammar that
#: allowed any amount would let a model that has lost its way write blanks to the end.
JSON_WHITESPACE = r"\n?[ \t]{0,20}"


@dataclass(frozen=True, slots=True)
class TaggedJson:
    """JSON between fixed texts, as tool calls are written. `special_token`, if any, is the control token before
    `begin`, by its name in the tokenizer, such as "<|python_tag|>"; ordinary text can never match one. `json_token` is
    one that comes after `begin`."""

    schema: Mapping[str, Any]
    begin: str = ""
    end: str = ""
    special_token: str = ""
    json_token: str = ""


def json_object_grammar() -> GrammarSpec:
    """Any JSON object."""
    return GrammarSpec("json_object", "")


def json_schema_grammar(schema: Mapping[str, Any]) -> GrammarSpec:
    """JSON that a schema allows; its properties come in the schema's order. Raises RecursionError where it is nested
    beyond what Python can write."""
    return GrammarSpec("json_schema", json.dumps(schema, ensure_ascii=False))


def regex_grammar(regex: str) -> GrammarSpec:
    """A regular expression that the whole answer must match. No look-around and no back references."""
    return GrammarSpec("regex", regex)


def choice_grammar(choices: Sequence[str]) -> GrammarSpec:
    """One of these texts."""
    return GrammarSpec("choice", json.dumps(list(choices), ensure_ascii=False))


def ebnf_grammar(text: str) -> GrammarSpec:
    """A grammar in Lark's notation (`start: ...`) or GBNF (`root ::= ...`)."""
    return GrammarSpec("ebnf", text)


def tagged_json_grammar(options: Sequence[TaggedJson], separator: str | None = None) -> GrammarSpec:
    """One of `options`, which forces a call of one of these tools; with a `separator` one or more of them, parted by
    it, for calls in parallel."""
    rules = [
        f"option_{number}: {option.special_token} {_literal(option.begin)} {option.json_token} "
        f"%json {_schema_text(option.schema)} {_literal(option.end)}"
        for number, option in enumerate(options)
    ]
    one = " | ".join(f"option_{number}" for number in range(len(options)))
    more = "" if separator is None else f" ({_literal(separator)} call)*"
    return GrammarSpec("ebnf", "\n".join([f"start: call{more}", f"call: {one}", *rules]) + "\n")


def _schema_text(schema: Mapping[str, Any]) -> str:
    return json.dumps({"x-guidance": {"whitespace_pattern": JSON_WHITESPACE}, **schema}, ensure_ascii=False)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
