"""What is done to a request's headers in Serve's proxy: those that it reads itself, and cannot, are left out, since it
would answer 500, and so is an empty id; and it is written down when the request came.

Serve calls `middlewares` in the proxy's process where `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` names it.
"""

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.arrival import HEADER, received_now

_REQUEST_ID = b"x-request-id"
#: read by the proxy before any application is asked
_NAMES = frozenset(
    {
        _REQUEST_ID,
        b"x-session-id",
        b"x-request-timeout-seconds",
        b"x-request-disconnect-disabled",
        b"serve-multiplexed-model-id",
    }
)


class ReadableHeaders:
    """ASGI middleware: leaves those of these headers out that are not ASCII, and an id that is empty. The request then
    gets an id as if it had come without one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if any(_is_unreadable(name, value) for name, value in scope.get("headers", ())):
            headers = [(name, value) for name, value in scope["headers"] if not _is_unreadable(name, value)]
            scope = {**scope, "headers": headers}
        await self._app(scope, receive, send)


def _is_unreadable(name: bytes, value: bytes) -> bool:
    name = name.lower().replace(b"_", b"-")
    return name in _NAMES and (not value.isascii() or (name == _REQUEST_ID and not value.strip()))


class Received:
    """ASGI middleware: says when the request came, whatever it says itself."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = [(name, value) for name, value in scope["headers"] if name.lower() != HEADER]
            scope = {**scope, "headers": [*headers, (HEADER, received_now())]}
        await self._app(scope, receive, send)


def middlewares() -> list[Middleware]:
    return [Middleware(Received), Middleware(ReadableHeaders)]
