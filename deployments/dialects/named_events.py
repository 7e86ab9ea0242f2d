"""Streams of server-sent events that have names, as Anthropic's and OpenAI's Responses are. Knows no event."""

import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

from deployments.answers import Delta
from deployments.event_stream import ClosingFields, StreamState
from deployments.protocol.errors import ApiError

logger = logging.getLogger(__name__)

#: the data of an event; its `type` is the event's name
Event = dict[str, Any]


class EventRendering(Protocol):
    """One response as events. `begin` is called with the first delta at hand, before it is rendered."""

    response_id: str

    def begin(self, first: Delta) -> list[Event]: ...

    def delta(self, delta: Delta) -> list[Event]: ...

    def end(self) -> list[Event]: ...

    def failure(self, error: ApiError) -> list[Event]: ...


async def named_events(
    deltas: AsyncGenerator[Delta, None],
    rendering: EventRendering,
    state: StreamState,
    closing_fields: ClosingFields | None = None,
) -> AsyncGenerator[bytes, None]:
    """The bytes of one stream. A failure before it has begun is raised; a later one is told as the last events. The
    last event of a stream that ends well has the `closing_fields`."""
    is_first = True
    try:
        async with aclosing(deltas):
            async for delta in deltas:
                events = rendering.begin(delta) if is_first else []
                is_first = False
                yield _bytes([*events, *rendering.delta(delta)])
        ending = rendering.end()
        if closing_fields is not None:
            ending[-1] |= await closing_fields()
        yield _bytes(ending)
    except Exception as error:
        if not state.has_begun:
            raise
        yield _bytes(rendering.failure(_as_api_error(error, rendering.response_id)))


def _as_api_error(error: Exception, response_id: str) -> ApiError:
    if isinstance(error, ApiError):
        logger.error("stream %s failed: %s", response_id, error.message)
        return error
    logger.error("stream %s failed", response_id, exc_info=error)
    return ApiError(500, "internal error", code="internal_error")


def _bytes(events: list[Event]) -> bytes:
    return b"".join(
        b"event: %s\ndata: %s\n\n"
        % (event["type"].encode(), json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode())
        for event in events
    )
