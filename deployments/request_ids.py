"""Every response says by which id its request can be found, once: in `x-request-id`."""

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-request-id"
_ACCEPTABLE = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class RequestIds:
    """ASGI middleware. The id names nothing inside; it lies at `request.state.request_id`, for error objects.

    By itself it adds the header: a client's id if it is short and plain, else a new one. `behind_serve`, Serve's proxy
    has given each request an id (a client's own, whatever it is) and appends it to each response: that id is kept, and
    no header is added.
    """

    def __init__(self, app: ASGIApp, *, behind_serve: bool = False) -> None:
        self._app = app
        self._behind_serve = behind_serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        state = scope.setdefault("state", {})
        if self._behind_serve:
            state.update(request_id=given, request_id_headers={})
            await self._app(scope, receive, send)
            return
        request_id = given if _ACCEPTABLE.fullmatch(given) else uuid.uuid4().hex
        state.update(request_id=request_id, request_id_headers={HEADER: request_id})

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


def request_id_headers(request: Request) -> dict[str, str]:
    """For a response that is sent outside of all middleware."""
    headers: dict[str, str] = request.state.request_id_headers
    return headers
