"""`WorkerReplica`: the Serve deployment around one engine.

Owns the replica's start, its place in Serve, and what it tells the metrics actor. Knows token ids, never text. It
loads torch when a replica starts, not with this module.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from ray import serve

from deployments.engine_seam import Loop, import_builder
from deployments.frames import Frame
from deployments.metrics_push import PUSH_PERIOD_S, MetricsPusher, log_failure
from deployments.model_facts import ModelFacts
from deployments.router import BLOCK_SIZE_KEY
from deployments.worker_service import WorkerService
from monitoring.metrics_actor import get_or_create
from monitoring.worker_metrics import WorkerMetrics
from worker.config import EngineConfig
from worker.types import EngineRequest

logger = logging.getLogger(__name__)

#: how often a worker whose streams have all ended is asked whether it still holds anything
_IDLE_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What a replica needs beside the engine's options. `model_name` labels its metrics."""

    model_name: str
    metrics_host: str
    metrics_port: int
    step_timeout_s: float
    stop_timeout_s: float
    engine_builder: str


class WorkerReplica:
    """Ready once the model is loaded and warm. When its engine dies, the process ends and Serve replaces it.

    `generate`, `finish` and `abort` take `target_replica` for the router; it is not looked at here.
    """

    async def __init__(self, config: EngineConfig, settings: WorkerSettings) -> None:  # type: ignore[misc]
        context = serve.get_replica_context()
        self._settings = settings
        self._app_name = context.app_name
        self._worker = 0 if context.rank is None else context.rank.rank
        self._service = WorkerService(
            self._worker, context.replica_id.unique_id, settings.step_timeout_s, partial(os._exit, 1)
        )
        build = import_builder(settings.engine_builder)
        self._facts, engine_loop = await asyncio.to_thread(
            build, config, self._service.deliver, self._service.on_death
        )
        self._service.start(engine_loop)
        self._reporter = asyncio.create_task(self._report_metrics(engine_loop))
        self._reporter.add_done_callback(log_failure)

    async def generate(
        self, request: EngineRequest, target_replica: str | None = None
    ) -> AsyncIterator[list[Frame]]:
        """Frames as `WorkerService.generate`. Serve cancels this generator when the client is gone."""
        frames_of_request = self._service.generate(request)
        try:
            async for frames in frames_of_request:
                yield frames
        finally:
            await frames_of_request.aclose()  # type: ignore[attr-defined]

    async def finish(
        self, request_id: str, index: int, num_tokens: int, target_replica: str | None = None
    ) -> None:
        self._service.finish(request_id, index, num_tokens)

    async def abort(self, request_id: str, target_replica: str | None = None) -> None:
        self._service.abort(request_id)

    async def describe(self) -> ModelFacts:
        """Raises `WorkerDeadError` where requests would not be served."""
        self._service.check_health()
        return self._facts

    def record_replica_metadata(self) -> dict[str, Any]:
        """Read by Serve once, for this replica's router."""
        return {BLOCK_SIZE_KEY: self._facts.block_size}

    async def check_health(self) -> None:
        self._service.check_health()

    async def _report_metrics(self, engine_loop: Loop) -> None:
        settings = self._settings
        actor = await asyncio.to_thread(
            get_or_create, self._app_name, settings.metrics_host, settings.metrics_port
        )
        pusher = MetricsPusher(actor, f"worker-{self._worker}")
        metrics = WorkerMetrics(settings.model_name, self._worker)
        metrics.set_pool_sizes(
            num_device_blocks=self._facts.num_device_blocks, num_host_blocks=self._facts.num_host_blocks
        )
        while True:
            metrics.fold(engine_loop.records_since(metrics.last_step_id))
            load = engine_loop.status().load
            metrics.set_load(
                num_waiting=load.num_waiting,
                num_running=load.num_running,
                num_swapped=load.num_swapped,
                num_used_device_blocks=load.num_used_blocks,
                num_used_host_blocks=load.num_used_host_blocks,
                num_cached_device_blocks=load.num_cached_blocks,
            )
            await pusher.push(metrics.snapshot())
            await self._next_report()

    async def _next_report(self) -> None:
        """Returns after a period, or as soon as the worker has turned idle: its gauges must not freeze."""
        try:
            async with asyncio.timeout(PUSH_PERIOD_S):
                await self._service.streams_ended.wait()
                self._service.streams_ended.clear()
                await asyncio.sleep(_IDLE_POLL_S)
                while not self._service.is_idle():
                    await asyncio.sleep(_IDLE_POLL_S)
        except TimeoutError:
            return

    async def __del__(self) -> None:
        """Serve calls it after the drain, also for a replica whose start failed."""
        if hasattr(self, "_reporter"):
            self._reporter.cancel()
            await self._service.stop(self._settings.stop_timeout_s)
