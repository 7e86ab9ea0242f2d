"""`ServeWorkerClient`: one attempt at a request, over one Serve deployment handle.

Owns which replica holds which open request, the watch over silent streams, and what the router is told. It knows
nothing of text or HTTP. What becomes of a request whose worker is lost is `failover.py`'s.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextvars import Context
from dataclasses import dataclass
from typing import Any, cast

from ray.exceptions import RayError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from deployments.frames import Accepted, Frame, Overloaded, Tokens
from deployments.prefix_index import PromptBlocks
from deployments.router_state import RouterState
from deployments.stream_watch import DrainedError, StalledError, StreamWatch
from deployments.worker_client import (
    RequestRejectedError,
    WorkerFailedError,
    WorkerLostError,
    WorkerOverloadedError,
    WorkerUnavailableError,
)
from deployments.worker_errors import is_worker_lost
from scheduler.life_report import LifeReport
from worker.prefix_keys import PrefixKeys
from worker.types import EngineRequest

logger = logging.getLogger(__name__)

#: before a request that no worker took in is sent again
_RETRY_PAUSE_S = 0.1
#: of a prompt: naming them takes about 1 µs each on the event loop, and what two prompts share is decided by then
MAX_NAMED_BLOCKS = 1024

#: Serve's gRPC transport: a sixth of the processor time per token of the default one. What is sent is of classes that
#: both ends have, which the plain pickle writes faster than the default
_TRANSPORT: dict[str, Any] = {
    "_by_reference": False,
    "request_serialization": "pickle",
    "response_serialization": "pickle",
}

Response = DeploymentResponseGenerator[list[Frame]]


@dataclass(frozen=True, slots=True)
class ClientTimeouts:
    """`accept_s`: until a worker holds the request. `stall_s`: between frames. `step_s`: one step of the worker.
    `drain_grace_s`: for a stream to end by itself once its worker is told to stop, if another one is there."""

    accept_s: float
    stall_s: float
    step_s: float
    drain_grace_s: float = 10.0


class ServeWorkerClient:
    """Implements `AttemptClient`. One per ingress replica; the handle's options are built once.

    A stream that is left is cancelled, which ends the worker's work, at once or when a worker that hangs goes on.
    """

    def __init__(
        self,
        handle: DeploymentHandle[Any],
        timeouts: ClientTimeouts,
        state: RouterState,
        on_routed: Callable[[str], None] = lambda reason: None,
        prefix_keys: PrefixKeys | None = None,
    ) -> None:
        """`on_routed` is called with the router's reason for each request that a worker took. `prefix_keys` name the
        blocks of prompts for the router; without them it looks at load alone."""
        self._generate = handle.options(method_name="generate", stream=True, **_TRANSPORT)
        self._finish = handle.options(method_name="finish", **_TRANSPORT)
        self._abort = handle.options(method_name="abort", **_TRANSPORT)
        self._life = handle.options(method_name="life", **_TRANSPORT)
        self._describe = handle.options(method_name="describe", **_TRANSPORT)
        self._timeouts = timeouts
        self._state = state
        self._on_routed = on_routed
        self._prefix_keys = prefix_keys
        self._replica_of: dict[str, str] = {}

    async def generate(
        self, request: EngineRequest, avoid: frozenset[str] = frozenset()
    ) -> AsyncGenerator[list[Frame], None]:
        request_id = request.request_id
        watch = StreamWatch(self._timeouts.stall_s, self._timeouts.drain_grace_s, self._state.has_running)
        self._state.open(request_id, avoid, on_left=watch.drain, blocks=self._blocks_of(request))
        response: Response | None = None
        try:
            response, first_frames = await self._until_accepted(request)
            frames: list[Frame] | None = first_frames
            while frames is not None:
                self._observe(request_id, frames)
                yield frames
                frames = await self._next_frames(request_id, watch, response)
        finally:
            if response is not None:
                _cancel(response)
            self._replica_of.pop(request_id, None)
            self._state.close(request_id)

    async def finish(self, request_id: str, index: int, num_tokens: int) -> None:
        await self._tell(self._finish, request_id, index, num_tokens)

    async def abort(self, request_id: str) -> None:
        await self._tell(self._abort, request_id)

    async def life(self, request_id: str, replica_id: str) -> LifeReport | None:
        """What the worker says that the attempt's time was spent on; None where it is gone or does not know."""
        try:
            life: LifeReport | None = await _call(self._life, request_id, target_replica=replica_id)
        except BaseException as error:
            if not _is_unreachable(error):
                raise
            logger.warning("worker %s could not be asked about a request: %r", replica_id, error)
            return None
        return life

    async def check_ready(self, replica_id: str) -> None:
        """Returns if that worker would serve a request now. Raises otherwise; one that hangs is waited for."""
        response = _call(self._describe, target_replica=replica_id)
        try:
            await response
        finally:
            response.cancel()

    async def _tell(self, handle: DeploymentHandle[Any], request_id: str, *args: int) -> None:
        replica_id = self._replica_of.get(request_id)
        if replica_id is None:
            return
        try:
            await _call(handle, request_id, *args, target_replica=replica_id)
        except BaseException as error:
            if not _is_unreachable(error):
                raise
            # The stream of this request reports the worker's failure; what it was to be told is over either way.
            logger.warning("worker %s could not be told of an end: %r", replica_id, error)

    async def _until_accepted(self, request: EngineRequest) -> tuple[Response, list[Frame]]:
        """The stream and its first frames. A worker that fails, or is silent, before it took the request in has
        promised nothing: another one is asked, or its successor. One whose queue is full is asked once."""
        timeout_s = self._timeouts.accept_s
        failure: BaseException | None = None
        retry_after_s: dict[str, float] = {}
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    # Ray types the call as either kind of response; a handle with stream=True gives this one.
                    response = cast("Response", _call(self._generate, request))
                    try:
                        async with asyncio.timeout(self._timeouts.stall_s):
                            frames = await anext(response)
                    except BaseException as error:
                        _cancel(response)
                        if not isinstance(error, TimeoutError) and not is_worker_lost(error):
                            raise
                        failure = error
                        self._state.suspect(request.request_id)
                        await asyncio.sleep(_RETRY_PAUSE_S)
                        continue
                    first = frames[0]
                    if not isinstance(first, Overloaded):
                        return response, frames
                    _cancel(response)
                    retry_after_s[self._state.replica_of(request.request_id)] = first.retry_after_s
                    if not self._state.avoid(request.request_id):
                        raise WorkerOverloadedError(min(retry_after_s.values()))
        except TimeoutError:
            raise WorkerUnavailableError(f"no worker took the request within {timeout_s:g} s") from failure
        except DeploymentUnavailableError as error:
            raise WorkerUnavailableError("no worker is available") from error
        except WorkerOverloadedError:
            raise
        except Exception as error:
            logger.error("a request failed before a worker took it: %r", error)
            raise WorkerFailedError("the worker failed on this request") from error

    async def _next_frames(self, request_id: str, watch: StreamWatch, response: Response) -> list[Frame] | None:
        """The next frames, or None at the stream's end."""
        replica_id = self._replica_of[request_id]
        try:
            return await watch.next(response)
        except StopAsyncIteration:
            return None
        except StalledError:
            self._state.suspect(request_id)
            message = f"the worker sent no sign of life for {self._timeouts.stall_s:g} s"
            raise WorkerLostError(message, "stalled", replica_id) from None
        except DrainedError:
            raise WorkerLostError("the worker is stopping", "drained", replica_id) from None
        except BaseException as error:
            if is_worker_lost(error):
                self._state.suspect(request_id)
                raise WorkerLostError("the worker that ran this request died", "died", replica_id) from error
            if not isinstance(error, Exception):
                raise
            # Over gRPC an exception of the worker's own code arrives as it is, whatever its type.
            logger.error("a request failed in worker %s: %r", replica_id, error)
            raise WorkerFailedError("the worker failed on this request") from error

    def _blocks_of(self, request: EngineRequest) -> PromptBlocks | None:
        if self._prefix_keys is None or request.params.prompt_logprobs is not None:
            return None  # a prompt that is scored is computed anew
        block_size = self._prefix_keys.block_size
        prompt = request.prompt_token_ids[: MAX_NAMED_BLOCKS * block_size]
        return PromptBlocks(self._prefix_keys.extend(self._prefix_keys.root(request.cache_salt), prompt), block_size)

    def _observe(self, request_id: str, frames: list[Frame]) -> None:
        for frame in frames:
            if isinstance(frame, Accepted):
                self._replica_of[request_id] = frame.replica_id
                self._on_routed(self._state.accepted(request_id, frame.replica_id))
                continue
            assert not isinstance(frame, Overloaded), "it can only be the first frame"
            replica_id = self._replica_of[request_id]
            self._state.report(request_id, replica_id, frame.load)
            if isinstance(frame, Tokens):
                for event in frame.events:
                    if event.num_cached_tokens is not None:
                        self._state.first_token(request_id, event.num_cached_tokens)
                    if event.is_refusal:
                        raise RequestRejectedError(event.error or "the request cannot be run")
                    if event.is_worker_lost:
                        self._state.suspect(request_id)
                        raise WorkerLostError(event.error or "the engine died", "died", replica_id)
            elif frame.step_age_s > self._timeouts.step_s:
                self._state.suspect(request_id)
                message = f"the worker is stuck in a step for {frame.step_age_s:.0f} s"
                raise WorkerLostError(message, "stalled", replica_id)


def _call(handle: DeploymentHandle[Any], *args: Any, **kwargs: Any) -> Any:
    """Call a worker outside of the context of the HTTP request.

    In it Serve gives every call the id of that request, and of several calls under way at once (prompts of one
    request, choices that end together, one question to each worker) it routes but one: where that one goes to a worker
    that hangs, the others wait with it. What ends with the request is ended here anyway.
    """
    return Context().run(handle.remote, *args, **kwargs)


def _is_unreachable(error: BaseException) -> bool:
    return isinstance(error, RayError) or is_worker_lost(error)


def _cancel(response: Response) -> None:
    """Leaving a stream alone would let the worker generate to the end.

    Where Serve's router runs on this loop, its own `cancel` passes over a call that has been sent when nobody has
    fetched the result yet: a client that leaves in just that moment.
    """
    response.cancel()  # type: ignore[no-untyped-call]
    sent = response._replica_result_future
    if sent.done() and not sent.cancelled() and sent.exception() is None:
        sent.result().cancel()  # type: ignore[no-untyped-call]
