"""`EventStream`: server-sent events as an HTTP response that begins late and is never silent for long.

Owns when the headers leave and the comments that keep a connection alive. Knows ASGI, nothing of what it sends.
"""

import asyncio
from collections.abc import AsyncGenerator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deployments.disconnects import ClientGoneError, unless_disconnected
from deployments.event_stream import StreamState

KEEP_ALIVE = b": keep-alive\n\n"


class EventStream(Response):
    """Sends what `source` yields. However the response ends, `source` is closed.

    The headers leave with the first event, so that a failure before it still becomes an HTTP status: it is raised. But
    once the requests are accepted, a comment leaves whenever nothing else did for `keep_alive_s` (0: never), after the
    headers if they have not left yet; a failure is an event then.
    """

    media_type = "text/event-stream"

    def __init__(self, source: AsyncGenerator[bytes, None], state: StreamState, keep_alive_s: float) -> None:
        super().__init__(headers={"Cache-Control": "no-store"})
        del self.headers["content-length"]
        self._source = source
        self._state = state
        self._keep_alive_s = keep_alive_s
        self._is_quiet = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._send_all(send))
        except (ClientGoneError, OSError):
            # A connection closed by the client, seen by the watch or by a write; the work ends below.
            if not self._state.has_begun:
                raise
        finally:
            await self._source.aclose()

    async def _send_all(self, send: Send) -> None:
        pulse = asyncio.create_task(self._keep_alive(send)) if self._keep_alive_s else None
        try:
            async for chunk in self._source:
                self._is_quiet = False
                await self._send(send, chunk)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            if pulse is not None:
                pulse.cancel()
                await asyncio.gather(pulse, return_exceptions=True)

    async def _keep_alive(self, send: Send) -> None:
        await self._state.accepted.wait()
        while True:
            self._is_quiet = True
            await asyncio.sleep(self._keep_alive_s)
            if self._is_quiet:
                await self._send(send, KEEP_ALIVE)

    async def _send(self, send: Send, chunk: bytes) -> None:
        if not self._state.has_begun:
            self._state.has_begun = True
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
