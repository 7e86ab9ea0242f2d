"""Twenty JSON schemas as applications write them, each with a question that calls for it, and inputs made to hurt.

Plain data: the tests, the library comparison and whoever wants an example share it.
"""

import json
from typing import Any

Schema = dict[str, Any]


def _object(properties: dict[str, Any], **keywords: Any) -> Schema:
    """Every property required and no other allowed, unless said otherwise."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
        **keywords,
    }


def _text(max_length: int, **keywords: Any) -> Schema:
    return {"type": "string", "maxLength": max_length, **keywords}


def _list(items: Schema, max_items: int, **keywords: Any) -> Schema:
    return {"type": "array", "items": items, "maxItems": max_items, **keywords}


_NODE = _object({"name": _text(8), "children": _list({"$ref": "#/$defs/node"}, 2)})
_EXPRESSION = {
    "anyOf": [
        {"type": "integer", "minimum": 0, "maximum": 99},
        _object({"op": {"enum": ["+", "-"]}, "left": {"$ref": "#/$defs/term"}, "right": {"$ref": "#/$defs/term"}}),
    ]
}

#: name → (schema, question)
SCHEMAS: dict[str, tuple[Schema, str]] = {
    "flat": (_object({"name": _text(20), "age": {"type": "integer"}}), "Describe a person as JSON."),
    "integer_bounds": (
        _object({"age": {"type": "integer", "minimum": 18, "maximum": 65}}),
        "How old is the carpenter? JSON.",
    ),
    "exclusive_bounds": (
        _object({"x": {"type": "integer", "exclusiveMinimum": -7, "exclusiveMaximum": 7}}),
        "A small number as JSON.",
    ),
    "decimal_bounds": (
        _object({"price": {"type": "number", "minimum": 0.5, "maximum": 99.25}}),
        "What does the bread cost? JSON.",
    ),
    "multiple_of": (
        _object({"minutes": {"type": "integer", "multipleOf": 15, "minimum": 0, "maximum": 120}}),
        "How long is the lesson? JSON.",
    ),
    "enum": (
        _object({"color": {"enum": ["red", "green", "deep blue", None, 7]}, "sure": {"type": "boolean"}}),
        "Which colour is the sky? JSON.",
    ),
    "constant": (
        _object({"version": {"const": "2.0"}, "ok": {"const": True}, "data": {"const": {"a": [1, None]}}}),
        "Give the header as JSON.",
    ),
    "nested": (
        _object({"user": _object({"address": _object({"city": _text(16), "zip": _text(5, pattern="^[0-9]{5}$")})})}),
        "Where does Ada live? JSON.",
    ),
    "array": (_list(_text(12), 4, minItems=2), "Name some fruits as a JSON list."),
    "array_of_objects": (
        _object({"items": _list(_object({"sku": _text(6), "count": {"type": "integer", "minimum": 1}}), 3)}),
        "What is in the basket? JSON.",
    ),
    "tuple": (
        {
            "type": "array",
            "prefixItems": [_text(8), {"type": "integer", "minimum": 0, "maximum": 9}, {"type": "boolean"}],
            "items": False,
            "minItems": 3,
        },
        "A word, a digit and a truth value as a JSON list.",
    ),
    "optional": (
        {
            "type": "object",
            "properties": {"title": _text(12), "note": _text(12), "rank": {"type": "integer", "maximum": 9}},
            "required": ["title"],
            "additionalProperties": False,
        },
        "A title, if you like with a note, as JSON.",
    ),
    "nullable": (
        _object({"nickname": {"type": ["string", "null"], "maxLength": 10}, "height": {"type": ["number", "null"]}}),
        "What is known of him? JSON.",
    ),
    "one_of": (
        {
            "anyOf": [
                _object({"kind": {"const": "circle"}, "radius": {"type": "integer", "minimum": 1, "maximum": 50}}),
                _object({"kind": {"const": "square"}, "side": {"type": "integer", "minimum": 1, "maximum": 50}}),
            ]
        },
        "A shape as JSON.",
    ),
    "pattern": (
        _object({"plate": {"type": "string", "pattern": "^[A-Z]{1,3}-[A-Z]{1,2} [1-9][0-9]{0,3}$"}}),
        "The car's number plate as JSON.",
    ),
    "formats": (
        _object({"day": {"type": "string", "format": "date"}, "id": {"type": "string", "format": "uuid"}}),
        "When does it begin? JSON.",
    ),
    "unicode": (
        _object({"größe": {"enum": ["klein", "groß"]}, "città": {"enum": ["Forlì", "日本", "🙂"]}, "名": _text(6)}),
        "Antworte als JSON.",
    ),
    "free_values": (
        {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9}, "maxProperties": 3},
        "Letters and digits as JSON.",
    ),
    "recursive_tree": (
        {**_object({"root": {"$ref": "#/$defs/node"}}), "$defs": {"node": _NODE}},
        "A small family tree as JSON.",
    ),
    "recursive_expression": ({"$ref": "#/$defs/term", "$defs": {"term": _EXPRESSION}}, "1 + 2 as a JSON tree."),
}


def _nested(depth: int) -> Schema:
    schema: Schema = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def _branching(depth: int) -> Schema:
    schema: Schema = {"type": "string", "minLength": 1}
    for level in range(depth):
        one, two = ({"type": "object", "properties": {f"{side}{level}": schema}} for side in "ab")
        schema = {"oneOf": [one, two]}
    return schema


def _all_of_patterns(count: int) -> Schema:
    return {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{count - n}}}"} for n in range(count)]}


def _deep_text(depth: int) -> str:
    """Too deep for a JSON parser written with recursion, so that it is text from the start."""
    return '{"items":' * depth + "true" + "}" * depth


#: name → (kind of grammar, its text). None of these may take a server's time.
HOSTILE: dict[str, tuple[str, str]] = {
    "nested 200 deep": ("json_schema", json.dumps(_nested(200))),
    "nested 100,000 deep": ("json_schema", _deep_text(100_000)),
    "oneOf nested 10 deep": ("json_schema", json.dumps(_branching(10))),
    "enum of 200,000": ("json_schema", json.dumps({"enum": [f"value {number}" for number in range(200_000)]})),
    "20,000 properties": (
        "json_schema",
        json.dumps({"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(20_000)}}),
    ),
    "minItems of a billion": ("json_schema", '{"type":"array","items":{"type":"integer"},"minItems":1000000000}'),
    "minLength of a billion": ("json_schema", '{"type":"string","minLength":1000000000}'),
    "reference to itself": ("json_schema", '{"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/a"}}}'),
    "1,500 references": (
        "json_schema",
        json.dumps(
            {
                "$ref": "#/$defs/d0",
                "$defs": {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(1500)}
                | {"d1500": {"type": "null"}},
            }
        ),
    ),
    "30 patterns at once": ("json_schema", json.dumps(_all_of_patterns(30))),
    "nested quantifiers": ("regex", r"((((a+)+)+)+)+$"),
    "repeated a billion times": ("regex", r"((a{1,1000}){1,1000}){1,1000}"),
    "states that double": ("regex", r"(a|b)*a(a|b){400}"),
    "states that double, nested": ("regex", r"(.*(a|b)*a.{200}){200}"),
    "a large class repeated": ("regex", r"(\p{L}|\p{N}|\p{P}){500}\p{Lu}{500}"),
    "groups 50,000 deep": ("regex", "(" * 50_000 + "a" + ")" * 50_000),
    "a rule that is itself": ("ebnf", "start: start"),
    "ambiguous": ("ebnf", 'start: e\ne: e e e e | e e e | e e | "a" | ""'),
    "rules that double": (
        "ebnf",
        "\n".join(["start: r0", *(f"r{n}: r{n + 1} r{n + 1}" for n in range(60)), 'r60: "a"']),
    ),
    "choice of 200,000": ("choice", json.dumps([f"choice {number}" for number in range(200_000)])),
}
