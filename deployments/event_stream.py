"""Answers as server-sent events. Owns the order of chunks, the usage chunk, and how a stream ends."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from deployments.answers import Delta
from deployments.protocol.errors import ApiError, error_body
from deployments.protocol.responses import Envelope, Usage
from deployments.rendering import Rendering

logger = logging.getLogger(__name__)

_DONE = b"data: [DONE]\n\n"

#: what is said last of an answer, asked for when all else is sent
ClosingFields = Callable[[], Awaitable[dict[str, Any]]]


@dataclass(slots=True)
class StreamState:
    """What a stream and its response tell each other. `accepted`: workers hold all of its requests, so that nothing is
    refused any more. `has_begun`: the headers are sent, and no failure can become an HTTP status."""

    accepted: asyncio.Event = field(default_factory=asyncio.Event)
    has_begun: bool = False


async def events(
    deltas: AsyncGenerator[Delta, None],
    rendering: Rendering,
    envelope: Envelope,
    usage: Usage | None,
    state: StreamState,
    closing_fields: ClosingFields | None = None,
) -> AsyncGenerator[bytes, None]:
    """The bytes of one stream. A failure before it has begun is raised, so that it can still become an HTTP status;
    a later one is an error event, after which the stream ends without `[DONE]`. `usage`, where it was asked for,
    is filled in and sent in a last chunk of its own, with the `closing_fields`."""
    try:
        async with aclosing(deltas):
            async for delta in deltas:
                choices = rendering.chunk_choices(delta)
                chunks = [_event(_chunk(rendering, envelope, choice, usage)) for choice in choices]
                if usage is not None:
                    usage.completion_tokens += delta.num_tokens
                    usage.cached_tokens += delta.num_cached_tokens
                if chunks:  # what may begin a tool call is held back
                    yield b"".join(chunks)
    except Exception as error:
        if not state.has_begun:
            raise
        yield _event(_failure(error, envelope.response_id))
        return
    last = {} if usage is None else {"usage": usage.to_dict()}
    if closing_fields is not None:
        last |= await closing_fields()
    if last:
        yield _event(envelope.to_dict(rendering.chunk_kind, []) | last)
    yield _DONE


def _chunk(rendering: Rendering, envelope: Envelope, choice: dict[str, Any], usage: Usage | None) -> dict[str, Any]:
    chunk = envelope.to_dict(rendering.chunk_kind, [choice])
    return chunk if usage is None else chunk | {"usage": None}


def _failure(error: Exception, response_id: str) -> dict[str, Any]:
    if isinstance(error, ApiError):
        logger.error("stream %s failed: %s", response_id, error.message)
        return error.body
    logger.error("stream %s failed", response_id, exc_info=error)
    return error_body("internal error", 500, code="internal_error")


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
