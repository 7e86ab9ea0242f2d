"""JSON schemas of calls, for grammars that force them."""

from typing import Any

from deployments.protocol.tools import Function

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def call_schema(function: Function, arguments_key: str) -> dict[str, Any]:
    """Of `{"name": ..., arguments_key: ...}`."""
    return {
        "type": "object",
        "properties": {
            "name": {"const": function.name},
            arguments_key: moved(parameters_of(function), f"#/properties/{arguments_key}"),
        },
        "required": ["name", arguments_key],
        "additionalProperties": False,
    }


def parameters_of(function: Function) -> dict[str, Any]:
    """Arguments are an object, also where the schema does not say so."""
    return {"type": "object", **function.parameters} if function.parameters else _NO_PARAMETERS


def moved(schema: Any, place: str) -> Any:
    """A schema whose references into itself still hold when it stands at `place` of another one."""
    if isinstance(schema, list):
        return [moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: place + value[1:]
        if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/"))
        else moved(value, place)
        for key, value in schema.items()
    }
