"""A request's body: read up to a limit, then parsed, off the event loop where that takes long. Knows no fields."""

import asyncio
import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, Self, TypeVar

from starlette.requests import ClientDisconnect, Request

from deployments.disconnects import ClientGoneError
from deployments.protocol.errors import ApiError, bad_request
from deployments.protocol.nesting import MAX_NESTING, is_too_deep


class Parsable(Protocol):
    """A body that makes itself of a JSON object, or raises ApiError."""

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self: ...


RequestT = TypeVar("RequestT", bound=Parsable)

#: parsing more than this takes longer than other requests should wait
_PARSE_ON_LOOP_BYTES = 64 * 1024
#: longer integers are more than a double holds, and soon more than Python turns into text and back
_MOST_DIGITS = 308
_TOO_LARGE = 10**_MOST_DIGITS
#: what every number has that could be one of them
_LONG_NUMBER = re.compile(rb"[0-9]{200}|[0-9][eE]\+?[0-9]{3}")
_MOST_PLACE_CHARS = 200


async def read_request(request: Request, kind: type[RequestT], max_body_bytes: int) -> RequestT:
    """Raises ApiError: 413 beyond the limit, announced or not; 400 for what is no JSON object or no such request."""
    body = await _read(request, max_body_bytes)
    if len(body) <= _PARSE_ON_LOOP_BYTES:
        return kind.parse(_parse(body))
    return await asyncio.to_thread(lambda: kind.parse(_parse(body)))


async def _read(request: Request, max_body_bytes: int) -> bytes:
    too_large = ApiError(413, f"the body is larger than {max_body_bytes} bytes", code="request_too_large")
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > max_body_bytes:
        raise too_large
    chunks: list[bytes] = []
    num_bytes = 0
    try:
        async for chunk in request.stream():
            num_bytes += len(chunk)
            if num_bytes > max_body_bytes:
                raise too_large
            chunks.append(chunk)
    except ClientDisconnect as error:
        raise ClientGoneError from error
    return b"".join(chunks)


def _parse(body: bytes) -> dict[str, Any]:
    try:
        # Given bytes, `json.loads` guesses at UTF-16 and lets raw surrogates through; JSON on the wire is UTF-8.
        text = body.decode("utf-8-sig")
        is_long = _LONG_NUMBER.search(body) is not None
        value = _loads_long_numbers(text) if is_long else json.loads(text, parse_constant=_refuse_constant)
        # Escapes can write half a surrogate pair, which is no text: no tokenizer takes it, no answer can hold it.
        if b"\\ud" in body.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeError as error:
        raise bad_request("the body is not valid Unicode text") from error
    except RecursionError as error:
        raise bad_request("the body is nested too deeply") from error
    except ValueError as error:
        where = f" at line {error.lineno}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise bad_request(f"the body is not valid JSON{where}") from error
    if not isinstance(value, dict):
        raise bad_request("the body must be a JSON object")
    # Hardly any body has so many brackets at all, nested or not.
    if body.count(b"[") + body.count(b"{") > MAX_NESTING:
        _check_nesting(value)
    return value


def _check_nesting(body: Mapping[str, Any]) -> None:
    """Raises ApiError that names the field whose value is nested too deeply."""
    for name, value in body.items():
        if is_too_deep(value):
            name = name[:_MOST_PLACE_CHARS]
            raise bad_request(f"{name or 'body'}: nested more than {MAX_NESTING} levels deep", name or None)


def _loads_long_numbers(text: str) -> Any:
    """Raises ApiError that names the place of a number that is too large. Digits in texts are none."""
    value = json.loads(
        text, parse_int=lambda digits: int(digits[: _MOST_DIGITS + 2]), parse_constant=_refuse_constant
    )
    found = _place_of_large(value)
    if found is not None:
        place, what = found[0][:_MOST_PLACE_CHARS], found[1]
        raise bad_request(f"{place or 'body'}: {what}", place or None)
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _place_of_large(value: Any, place: str = "") -> tuple[str, str] | None:
    """As error messages name places, `messages[0].content`; and what is wrong there."""
    if isinstance(value, int):
        return (place, f"the number has more than {_MOST_DIGITS} digits") if abs(value) >= _TOO_LARGE else None
    if isinstance(value, float):
        return (place, "the number is larger than a double can be") if math.isinf(value) else None
    items: Iterable[tuple[str, Any]] = ()
    if isinstance(value, dict):
        items = ((f"{place}.{key}" if place else key, item) for key, item in value.items())
    elif isinstance(value, list):
        items = ((f"{place}[{index}]", item) for index, item in enumerate(value))
    return next((found for name, item in items if (found := _place_of_large(item, name)) is not None), None)
