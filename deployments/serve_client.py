"""`ServeWorkerClient`: the workers as the ingress sees them, over one Serve deployment handle.

Owns which replica holds which open request, the watch over silent streams, and what the router is told. It knows
nothing of text or HTTP. A worker that fails ends its requests with an error; nothing is resumed elsewhere yet.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextvars import Context
from dataclasses import dataclass
from typing import Any, cast

from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from deployments.frames import Accepted, Frame, Overloaded, Tokens
from deployments.router_state import RouterState
from deployments.worker_client import (
    RequestRejectedError,
    WorkerFailedError,
    WorkerOverloadedError,
    WorkerUnavailableError,
)
from deployments.worker_service import WorkerDeadError
from worker.types import EngineRequest

logger = logging.getLogger(__name__)

#: before a request that no worker took in is sent again
_RETRY_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class ClientTimeouts:
    """`accept_s`: until a worker holds the request. `stall_s`: between frames. `step_s`: one step of the worker."""

    accept_s: float
    stall_s: float
    step_s: float


class ServeWorkerClient:
    """Implements `WorkerClient`. One per ingress replica; the handle's options are built once."""

    def __init__(self, handle: DeploymentHandle[Any], timeouts: ClientTimeouts, state: RouterState) -> None:
        # Serve's gRPC transport: a sixth of the processor time per token of the default one.
        self._generate = handle.options(method_name="generate", stream=True, _by_reference=False)
        self._finish = handle.options(method_name="finish", _by_reference=False)
        self._abort = handle.options(method_name="abort", _by_reference=False)
        self._timeouts = timeouts
        self._state = state
        self._replica_of: dict[str, str] = {}

    async def generate(self, request: EngineRequest) -> AsyncIterator[list[Frame]]:
        request_id = request.request_id
        self._state.open(request_id)
        response: DeploymentResponseGenerator[list[Frame]] | None = None
        try:
            response, first_frames = await self._until_accepted(request)
            frames: list[Frame] | None = first_frames
            while frames is not None:
                self._observe(request_id, frames)
                yield frames
                frames = await self._next_frames(request_id, response)
        finally:
            if response is not None:
                _cancel(response)
            self._replica_of.pop(request_id, None)
            self._state.close(request_id)

    async def finish(self, request_id: str, index: int, num_tokens: int) -> None:
        replica_id = self._replica_of.get(request_id)
        if replica_id is None:
            return
        try:
            await _call(self._finish, request_id, index, num_tokens, target_replica=replica_id)
        except RayError as error:
            # The stream of this request reports the worker's failure; the choice is over either way.
            logger.warning("worker %s could not be told of a finished choice: %s", replica_id, error)

    async def abort(self, request_id: str) -> None:
        replica_id = self._replica_of.get(request_id)
        if replica_id is None:
            return
        try:
            await _call(self._abort, request_id, target_replica=replica_id)
        except RayError as error:
            logger.warning("worker %s could not be told of an abort: %s", replica_id, error)

    async def _until_accepted(
        self, request: EngineRequest
    ) -> tuple[DeploymentResponseGenerator[list[Frame]], list[Frame]]:
        """The stream and its first frames. A worker that fails, or is silent, before it took the request in has
        promised nothing: another one is asked, or its successor."""
        timeout_s = self._timeouts.accept_s
        failure: Exception | None = None
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    # Ray types the call as either kind of response; a handle with stream=True gives this one.
                    response = cast("DeploymentResponseGenerator[list[Frame]]", _call(self._generate, request))
                    try:
                        async with asyncio.timeout(self._timeouts.stall_s):
                            return response, await anext(response)
                    except (RayActorError, WorkerDeadError) as error:
                        failure = error
                        _cancel(response)
                    except TimeoutError as error:
                        failure = error
                        self._state.suspect(request.request_id)
                        _cancel(response)
                    except BaseException:
                        _cancel(response)
                        raise
                    await asyncio.sleep(_RETRY_PAUSE_S)
        except TimeoutError:
            raise WorkerUnavailableError(f"no worker took the request within {timeout_s:g} s") from failure
        except DeploymentUnavailableError as error:
            raise WorkerUnavailableError("no worker is available") from error
        except Exception as error:
            logger.error("a request failed before a worker took it: %r", error)
            raise WorkerFailedError("the worker failed on this request") from error

    async def _next_frames(
        self, request_id: str, response: DeploymentResponseGenerator[list[Frame]]
    ) -> list[Frame] | None:
        """The next frames, or None at the stream's end."""
        replica_id = self._replica_of[request_id]
        timeout_s = self._timeouts.stall_s
        try:
            async with asyncio.timeout(timeout_s):
                return await anext(response)
        except StopAsyncIteration:
            return None
        except TimeoutError:
            logger.error("worker %s sent nothing for %g s", replica_id, timeout_s)
            self._state.suspect(request_id)
            raise WorkerFailedError(f"the worker sent no sign of life for {timeout_s:g} s") from None
        except RayActorError as error:
            logger.error("worker %s died: %s", replica_id, error)
            raise WorkerFailedError("the worker that ran this request died") from error
        except Exception as error:
            # Over gRPC an exception of the worker's own code arrives as it is, whatever its type.
            logger.error("a request failed in worker %s: %r", replica_id, error)
            raise WorkerFailedError("the worker failed on this request") from error

    def _observe(self, request_id: str, frames: list[Frame]) -> None:
        for frame in frames:
            if isinstance(frame, Accepted):
                self._replica_of[request_id] = frame.replica_id
                continue
            if isinstance(frame, Overloaded):
                raise WorkerOverloadedError(frame.retry_after_s)
            self._state.report(request_id, self._replica_of[request_id], frame.load)
            if isinstance(frame, Tokens):
                for event in frame.events:
                    if event.is_refusal:
                        raise RequestRejectedError(event.error or "the request cannot be run")
            elif frame.step_age_s > self._timeouts.step_s:
                raise WorkerFailedError(f"the worker is stuck in a step for {frame.step_age_s:.0f} s")


def _call(handle: DeploymentHandle[Any], *args: Any, **kwargs: Any) -> Any:
    """Call a worker outside of the context of the HTTP request.

    In it Serve gives every call the id of that request, and of several calls under way at once (prompts of one
    request, choices that end together) it loses all but the last. What ends with the request is ended here anyway.
    """
    return Context().run(handle.remote, *args, **kwargs)


def _cancel(response: DeploymentResponseGenerator[list[Frame]]) -> None:
    """Leaving a stream alone would let the worker generate to the end."""
    response.cancel()  # type: ignore[no-untyped-call]
