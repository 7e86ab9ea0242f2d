"""The seam between the API and the workers: what the ingress may ask of whoever runs requests.

Knows neither Serve nor HTTP. `failover.py` implements it over attempts, `serve_client.py` makes one attempt.
"""

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Literal, Protocol

from deployments.frames import Frame
from worker.types import EngineRequest


class WorkerUnavailableError(Exception):
    """No worker took the request (503)."""


class WorkerOverloadedError(Exception):
    """Every worker's queue is full (429). The first may have room in `retry_after_s` seconds."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(f"every worker's queue is full; try again in {retry_after_s:.0f} s")
        self.retry_after_s = retry_after_s


class RequestRejectedError(Exception):
    """The worker refuses this request for what it asks (400)."""

    def __init__(self, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param


class WorkerFailedError(Exception):
    """The worker that held the request died, stalled or failed (500, or an error event inside a stream)."""


#: "died": its process or its engine ended. "stalled": it gave no sign of life, or hangs in a step. "drained": it was
#: told to stop, and its time is over
LostReason = Literal["died", "stalled", "drained"]


class WorkerLostError(WorkerFailedError):
    """The worker is lost to this request, for a reason that is not the request's: another worker may go on with it."""

    def __init__(self, message: str, reason: LostReason, replica_id: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.replica_id = replica_id


class WorkerClient(Protocol):
    def generate(self, request: EngineRequest) -> AsyncIterator[list[Frame]]:
        """The frames of one request. Closing the iterator ends the worker's work."""
        ...

    async def finish(self, request_id: str, index: int, num_tokens: int) -> None:
        """This choice ended at the ingress, after `num_tokens` tokens. Idempotent."""
        ...

    async def abort(self, request_id: str) -> None:
        """Nobody wants this request any more. Idempotent."""
        ...


class AttemptClient(Protocol):
    """One attempt at a request: what runs it may be lost (`WorkerLostError`). Each attempt has an id of its own."""

    def generate(self, request: EngineRequest, avoid: frozenset[str]) -> AsyncGenerator[list[Frame], None]:
        """As `WorkerClient.generate`. The replicas `avoid` are asked only where there is no other."""
        ...

    async def finish(self, request_id: str, index: int, num_tokens: int) -> None: ...

    async def abort(self, request_id: str) -> None: ...
