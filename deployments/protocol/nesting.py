"""How deep JSON from outside may be nested, so that whatever walks through it by recursion comes to its end. Knows no
fields.
"""

import json
from typing import Any

#: levels of lists and objects in one value; more than any schema needs, far fewer than Python's stack holds
MAX_NESTING = 128


def is_too_deep(value: Any) -> bool:
    """Whether a JSON value has more than `MAX_NESTING` levels of lists and objects."""
    level = [value] if isinstance(value, list | dict) else []
    for _ in range(MAX_NESTING):
        if not level:
            return False
        items = (item for outer in level for item in (outer.values() if isinstance(outer, dict) else outer))
        level = [item for item in items if isinstance(item, list | dict)]
    return bool(level)


def json_in_text(text: str) -> Any:
    """The JSON value that a text holds. Raises ValueError where it is none, or too deep."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if is_too_deep(value):
        raise ValueError("nested too deeply")
    return value
