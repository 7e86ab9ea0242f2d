"""A request's body: read up to a limit, then parsed, off the event loop where that takes long. Knows no fields."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Protocol, Self, TypeVar

from starlette.requests import ClientDisconnect, Request

from deployments.disconnects import ClientGoneError
from deployments.protocol.errors import ApiError, bad_request


class Parsable(Protocol):
    """A body that makes itself of a JSON object, or raises ApiError."""

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self: ...


RequestT = TypeVar("RequestT", bound=Parsable)

#: parsing more than this takes longer than other requests should wait
_PARSE_ON_LOOP_BYTES = 64 * 1024


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
        value = json.loads(body.decode("utf-8-sig"))
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
    return value
