"""How a route answers once its jobs are made: whole or as a stream, and what it asks of `app.state`."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from fastapi import Request
from starlette.responses import Response

from deployments.answer_runs import Job
from deployments.answers import Delta
from deployments.api_service import ApiService
from deployments.disconnects import unless_disconnected
from deployments.event_response import EventStream
from deployments.event_stream import ClosingFields, StreamState
from deployments.key_check import caller_of
from deployments.rendering import whole_answers

#: from the answers' deltas to the bytes of a stream
StreamRendering = Callable[[AsyncGenerator[Delta, None], StreamState], AsyncGenerator[bytes, None]]


def service_of(request: Request) -> ApiService:
    service: ApiService = request.app.state.service
    return service


def explained(request: Request, service: ApiService, response_id: str, asked: bool | None) -> ClosingFields | None:
    """The `explanation` of the answer, as its caller may see it; None if it was not asked for."""
    if not asked:
        return None
    caller, has_keys = caller_of(request, service.settings), service.settings.keys is not None

    async def fields() -> dict[str, Any]:
        return {"explanation": await service.explain.explanation_if_known(response_id, caller, has_keys=has_keys)}

    return fields


async def whole(request: Request, service: ApiService, jobs: list[Job]) -> list[Delta]:
    """All answers, by index. Raises ClientGoneError if the client leaves meanwhile."""
    return await unless_disconnected(request.receive, whole_answers(service.run(jobs)))


async def told(request: Request, service: ApiService, jobs: list[Job], take: Callable[[Delta], object]) -> None:
    """Gives `take` each delta as it comes, to the end of all answers. Raises ClientGoneError as above."""

    async def follow() -> None:
        async with aclosing(service.run(jobs)) as deltas:
            async for delta in deltas:
                take(delta)

    await unless_disconnected(request.receive, follow())


def streamed(service: ApiService, jobs: list[Job], rendering: StreamRendering) -> Response:
    """What fails before the headers have left still becomes an HTTP status."""
    state = StreamState()
    stream = rendering(service.run(jobs, state.accepted), state)
    return EventStream(stream, state, service.settings.keep_alive_s)
