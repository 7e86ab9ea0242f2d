"""Which errors of a call to a worker say that the worker is lost, rather than that the request went wrong there."""

import asyncio

import grpc  # type: ignore[import-untyped]
from ray.exceptions import RayActorError, TaskCancelledError

from deployments.worker_service import WorkerDeadError

#: of a stream whose other end went away; a peer that is gone (UNAVAILABLE) comes as a `RayActorError`
_BROKEN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL)


def is_worker_lost(error: BaseException) -> bool:
    """Whether another worker may do better with the same request."""
    if isinstance(error, grpc.aio.AioRpcError):
        return error.code() in _BROKEN
    if isinstance(error, asyncio.CancelledError):
        # The worker's own end, handed on as it is; if it were ours, this task would be told to stop, too.
        task = asyncio.current_task()
        return task is None or task.cancelling() == 0
    return isinstance(error, RayActorError | WorkerDeadError | TaskCancelledError)
