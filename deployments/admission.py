"""`Admission`: which calls an ingress replica takes on, and how it comes to an end.

Owns the count of open calls and the drain. A call that is turned away costs neither a body nor a token. Knows the
routes that make work, nothing of what they do.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.cutoff import Cutoff
from deployments.error_responses import error_response, route_path
from deployments.key_check import claimed_tenant
from deployments.protocol.errors import ApiError, server_stopping, too_many_open_requests, unavailable

WORK_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")

_POLL_S = 0.05
#: for the last events of answers that were cut off to leave the process
_FLUSH_S = 2.0


class Admission:
    """`max_open_requests`: calls that may be open at once; 0: no limit. `is_any_worker`: whether anybody could answer;
    `on_rejected` is told of each call that is turned away: why, and whose it was."""

    def __init__(
        self,
        max_open_requests: int,
        on_rejected: Callable[[str, str], None],
        is_any_worker: Callable[[], bool] = lambda: True,
    ) -> None:
        self._max_open_requests = max_open_requests
        self._on_rejected = on_rejected
        self._is_any_worker = is_any_worker
        self._cutoffs: set[Cutoff] = set()
        self._is_over = False
        self.num_open = 0
        self.is_draining = False

    def refusal(self, tenant: str = "") -> ApiError | None:
        """Why a call of this tenant that comes now is turned away, which is counted."""
        if self.is_draining:
            reason, error = "draining", server_stopping()
        elif self._max_open_requests and self.num_open >= self._max_open_requests:
            reason, error = "open_requests", too_many_open_requests(self._max_open_requests)
        elif not self._is_any_worker():
            reason, error = "unavailable", unavailable("no worker is running")
        else:
            return None
        self._on_rejected(reason, tenant)
        return error

    @contextmanager
    def cutoff(self, deadline_s: float | None, error: ApiError) -> Iterator[Cutoff]:
        """Of an answer that runs within the block; the drain ends it, too."""
        cutoff = Cutoff(deadline_s, error)
        if self._is_over:
            cutoff.end(server_stopping())
        self._cutoffs.add(cutoff)
        try:
            yield cutoff
        finally:
            self._cutoffs.remove(cutoff)

    async def drain(self, timeout_s: float) -> None:
        """Takes nothing on any more; what is open has `timeout_s` to end, then it ends with an error. Returns when
        nothing is open, or when that has had its time, too."""
        self.is_draining = True
        await self._until_nothing_is_open(timeout_s)
        self._is_over = True
        for cutoff in self._cutoffs:
            cutoff.end(server_stopping())
        await self._until_nothing_is_open(_FLUSH_S)

    async def _until_nothing_is_open(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        while self.num_open and loop.time() < end_s:
            await asyncio.sleep(_POLL_S)


class AdmissionGate:
    """ASGI middleware: counts calls that make work from their first byte to their last, and turns some away."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or route_path(scope) not in WORK_PATHS:
            await self._app(scope, receive, send)
            return
        service = scope["app"].state.service
        admission: Admission = service.admission
        error = admission.refusal(claimed_tenant(scope, service.settings))
        if error is not None:
            await error_response(scope, error)(scope, receive, send)
            return
        admission.num_open += 1
        try:
            await self._app(scope, receive, send)
        finally:
            admission.num_open -= 1
