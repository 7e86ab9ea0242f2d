"""`check_bounds`: how long the texts are that a grammar may hold an answer to, told before the library sees it.

The library writes text that a grammar leaves no choice about in one go, and fails where it is too long, in the middle
of an answer. Knows the notations as far as that takes; what it cannot read it leaves to the library.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from worker.grammar.errors import GrammarError
from worker.types import GrammarSpec

#: of a text, or of what repeats come to at least. Each mask costs the library the rest of the text: so much takes about
#: 2 ms a token; its lexer fails at 30,000 to 50,000.
MAX_FIXED_BYTES = 4096
_MANY = 10**12
_LEAST_COUNTS = ("minLength", "minItems", "minProperties")

_REGEX_PART = re.compile(
    r"""(?P<open>\((?:\?(?:P?<[A-Za-z_]\w*>|[a-zA-Z-]*:))?(?!\?))|(?P<close>\))|(?P<either>\|)
    |(?P<nothing>\(\?[a-zA-Z-]+\)|[*+?^$]|\\[bBAzZ])|\{\s*(?P<count>\d*)\s*(?:,\s*\d*\s*)?\}
    |(?P<atom>\\[pP]\{[^}]*\}|\\[xuU]\{[^}]*\}|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.
    |\[\^?\]?(?:\\.|\[:\w+:\]|[^\]\\])*\]|.)""",
    re.VERBOSE | re.DOTALL,
)
_GBNF_CLASS = re.compile(r"(\"(?:\\.|[^\"\\\n])*\")|\[(?:\\.|[^\]\\\n])*\]")
_EBNF_PART = re.compile(
    r"""(?P<text>"(?:\\.|[^"\\\n])*")|(?://|\#)[^\n]*|/(?P<regex>(?:\\.|[^/\\\n])+)/
    |(?P<json>%json\b\s*)|\{\s*(?P<count>\d+)|~\s*(?P<tilde>\d+)|(?P<other>\S)""",
    re.VERBOSE,
)


def check_bounds(spec: GrammarSpec) -> None:
    """Raises GrammarError for a text that is too long, by its place in the grammar."""
    for place, num_bytes in _fixed_texts(spec):
        if num_bytes > MAX_FIXED_BYTES:
            told = f"{place}: " if place else ""
            size = f"over {_MANY}" if num_bytes >= _MANY else num_bytes
            raise GrammarError(
                f"{told}it asks for {size} bytes, characters or items in a row; at most {MAX_FIXED_BYTES} may be"
            )


def fixed_bytes(regex: str) -> int:
    """What the longest way through a regular expression is held to at least, in bytes or characters, each repeat taken
    as often as it must be, and once where it need not be."""
    # of each open group: its longest alternative so far, the one being read up to its last part, and that part
    groups = [[0, 0, 0]]
    for part in _REGEX_PART.finditer(regex):
        group = groups[-1]
        if part["open"]:
            groups.append([0, 0, 0])
        elif part["close"]:
            if len(groups) > 1:
                longest, before, last = groups.pop()
                groups[-1][1] += groups[-1][2]
                groups[-1][2] = max(longest, before + last)
        elif part["either"]:
            group[:] = max(group[0], group[1] + group[2]), 0, 0
        elif part["count"] is not None:
            group[2] = min(group[2] * max(int(part["count"][:12] or 0), 1), _MANY)
        elif part["atom"]:
            group[1] = min(group[1] + group[2], _MANY)
            group[2] = _num_bytes(part["atom"]) if len(part["atom"]) == 1 else 1
    return min(sum(max(longest, before + last) for longest, before, last in groups), _MANY)


def _fixed_texts(spec: GrammarSpec) -> Iterator[tuple[str, int]]:
    """(place, size), the place empty where the grammar is no more than that."""
    if spec.kind == "regex":
        yield "", fixed_bytes(spec.text)
    elif spec.kind == "json_schema":
        try:
            schema = json.loads(spec.text)
        except (ValueError, RecursionError):
            return  # the library says what is wrong
        yield from _of_schema(schema)
    elif spec.kind == "choice":
        for number, choice in enumerate(json.loads(spec.text)):
            yield str(number), _num_bytes(choice)
    elif spec.kind == "ebnf":
        yield from _of_ebnf(spec.text)


def _of_schema(schema: Any) -> Iterator[tuple[str, int]]:
    waiting: list[tuple[str, Any]] = [("", schema)]
    while waiting:
        place, part = waiting.pop()
        if isinstance(part, list):
            waiting += [(f"{place}.{number}".lstrip("."), item) for number, item in enumerate(part)]
        if not isinstance(part, dict):
            continue
        for key, value in part.items():
            name = f"{place}.{key}".lstrip(".") if len(key) <= 100 else f"{place}.{key[:100]}…"
            if place.endswith("patternProperties"):
                yield name, fixed_bytes(key)
            else:
                yield name, _num_bytes(key)
            if key == "pattern" and isinstance(value, str):
                yield name, fixed_bytes(value)
            elif key in _LEAST_COUNTS and isinstance(value, int | float):
                yield name, int(min(value, _MANY))
            elif key == "const" and not isinstance(value, dict | list):
                yield name, _num_bytes(json.dumps(value, ensure_ascii=False))
            elif key == "enum" and isinstance(value, list):
                for number, item in enumerate(value):
                    if isinstance(item, str):
                        yield f"{name}.{number}", _num_bytes(item)
            else:
                waiting.append((name, value))


def _of_ebnf(text: str) -> Iterator[tuple[str, int]]:
    if "::=" in text:
        text = _GBNF_CLASS.sub(lambda found: found[1] or '"c"', text)
    start, last = 0, 1
    while (part := _EBNF_PART.search(text, start)) is not None:
        start = part.end()
        line = f"line {text.count(chr(10), 0, part.start()) + 1}"
        if part["json"]:
            try:
                schema, start = json.JSONDecoder().raw_decode(text, start)
            except (ValueError, RecursionError):
                continue
            yield from ((f"{line}: {place}", size) for place, size in _of_schema(schema))
        elif count := part["count"] or part["tilde"]:
            yield line, last * int(count[:12])
        elif part["text"] or part["regex"]:
            last = fixed_bytes(part["regex"]) if part["regex"] else _num_bytes(part["text"]) - 2
            yield line, last
        elif part["other"]:
            last = 1


def _num_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))
