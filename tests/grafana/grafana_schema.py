"""Grafana's published schema of dashboards, as its foundation SDK has it: what in a dashboard does not fit."""

import enum
import types
import typing
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

Json = dict[str, Any]


def schema_faults(dashboard: Json) -> list[str]:
    """Fields that the schema does not know, and values of another type than it has. Paths into the dashboard."""
    register_default_plugins()
    model = Dashboard.from_json(dashboard)
    return [*_unknown(dashboard, _plain(model), ""), *_wrong_types(model, Dashboard, "")]


def _plain(value: Any) -> Any:
    """The model as JSON: fields that it has no place for are not there."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, str | int | float | bool | None):
        return value
    return _plain(JSONEncoder().default(value))


def _unknown(given: Any, known: Any, path: str) -> list[str]:
    if isinstance(given, dict) and isinstance(known, dict):
        faults = [f"{path}.{key}: unknown field" for key in given if key not in known]
        for key in given.keys() & known:
            faults += _unknown(given[key], known[key], f"{path}.{key}")
        return faults
    if isinstance(given, list) and isinstance(known, list) and len(given) == len(known):
        pairs = enumerate(zip(given, known, strict=True))
        return [fault for number, (one, other) in pairs for fault in _unknown(one, other, f"{path}[{number}]")]
    return [] if given == known else [f"{path}: {given!r} is read as {known!r}"]


def _wrong_types(value: Any, hint: Any, path: str) -> list[str]:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        found = [_wrong_types(value, option, path) for option in typing.get_args(hint)]
        return min(found, key=len)
    if origin is list:
        if not isinstance(value, list):
            return [f"{path}: {value!r} is no list"]
        [item] = typing.get_args(hint)
        return [fault for number, each in enumerate(value) for fault in _wrong_types(each, item, f"{path}[{number}]")]
    if origin is dict:
        return [] if isinstance(value, dict) else [f"{path}: {value!r} is no object"]
    if origin is typing.Literal:
        return [] if value in typing.get_args(hint) else [f"{path}: {value!r} is none of {typing.get_args(hint)}"]
    return _wrong_simple(value, hint, path)


def _wrong_simple(value: Any, hint: Any, path: str) -> list[str]:
    if hint in (object, Any) or hint is None:
        return _wrong_members(value, path)
    if hint is type(None):
        return [] if value is None else [f"{path}: {value!r} is not null"]
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return [] if value in [member.value for member in hint] else [f"{path}: {value!r} is no {hint.__name__}"]
    if hint in (int, float):
        is_number = isinstance(value, int | hint) and not isinstance(value, bool)
        return [] if is_number else [f"{path}: {value!r} is no {hint.__name__}"]
    if isinstance(value, dict) and hasattr(hint, "from_json"):  # the SDK leaves some as they are
        model = hint.from_json(value)
        return [*_unknown(value, _plain(model), path), *_wrong_types(model, hint, path)]
    if not isinstance(value, hint):
        return [f"{path}: {value!r} is no {hint.__name__}"]
    return _wrong_members(value, path)


def _wrong_members(value: Any, path: str) -> list[str]:
    """Of one of the SDK's objects, whichever it is: panels and queries are of the class that their type names."""
    if not type(value).__module__.startswith("grafana_foundation_sdk.models"):
        return []
    hints = typing.get_type_hints(type(value))
    members = vars(value).items()
    return [fault for name, each in members for fault in _wrong_types(each, hints[name], f"{path}.{name}")]
