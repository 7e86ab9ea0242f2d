"""How a route answers once its jobs are made: whole or as a stream, and what it asks of `app.state`."""

from collections.abc import AsyncGenerator, Callable

from fastapi import Request
from starlette.responses import Response

from deployments.answers import Delta
from deployments.api_service import ApiService, Job
from deployments.disconnects import EventStream, unless_disconnected
from deployments.rendering import whole_answers

#: from the answers' deltas to the bytes of a stream
StreamRendering = Callable[[AsyncGenerator[Delta, None]], AsyncGenerator[bytes, None]]


def service_of(request: Request) -> ApiService:
    service: ApiService = request.app.state.service
    return service


async def whole(request: Request, service: ApiService, jobs: list[Job]) -> list[Delta]:
    """All answers, by index. Raises ClientGoneError if the client leaves meanwhile."""
    return await unless_disconnected(request.receive, whole_answers(service.run(jobs)))


async def streamed(request: Request, service: ApiService, jobs: list[Job], rendering: StreamRendering) -> Response:
    """What fails before the first token still becomes an HTTP status."""
    stream = rendering(service.run(jobs))
    try:
        head = await unless_disconnected(request.receive, _first(stream))
    except BaseException:
        # Also where the first token was there already: nobody else knows of the stream yet.
        await stream.aclose()
        raise
    return EventStream(head, stream)


async def _first(stream: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(stream)
