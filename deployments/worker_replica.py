"""`WorkerReplica`: the Serve deployment around one engine.

Owns the replica's start, its place in Serve, and what it tells the metrics actor. Knows token ids, never text. It
loads torch when a replica starts, not with this module.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ray import serve
from ray.serve.schema import ReplicaRank

from deployments.build_facts import worker_info
from deployments.engine_seam import import_builder
from deployments.frames import Frame
from deployments.live_options import options_at_start
from deployments.metrics_push import log_failure
from deployments.model_facts import ModelFacts
from deployments.replica_log import write_to_serves_log
from deployments.router import BLOCK_SIZE_KEY
from deployments.worker_reporter import WorkerReporter
from deployments.worker_service import WorkerService
from monitoring.metrics_actor import get_or_create
from scheduler.life_report import LifeReport
from scheduler.limits import LimitError
from worker.config import EngineConfig
from worker.types import EngineRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What a replica needs beside the engine's options. `model_name` labels its metrics."""

    model_name: str
    metrics_host: str
    metrics_port: int
    vllm_metric_names: bool
    step_timeout_s: float
    stop_timeout_s: float
    engine_builder: str
    max_queued_tokens: int | None
    max_queued_requests: int
    target_queue_s: float


class WorkerReplica:
    """Ready once the model is loaded and warm. When its engine dies, the process ends and Serve replaces it.

    All calls take `target_replica` for the router; it is not looked at here.
    """

    async def __init__(self, config: EngineConfig, settings: WorkerSettings) -> None:  # type: ignore[misc]
        write_to_serves_log()
        context = serve.get_replica_context()
        self._settings = settings
        rank = 0 if context.rank is None else context.rank.rank
        self._service = WorkerService(
            rank, context.replica_id.unique_id, settings.step_timeout_s, partial(os._exit, 1)
        )
        build = import_builder(settings.engine_builder)
        self._facts, engine_loop = await asyncio.to_thread(
            build, config, self._service.deliver, self._service.on_death
        )
        self._service.start(engine_loop, self._facts.block_size)
        self._start_options = options_at_start(
            engine_loop.limits, settings.max_queued_tokens, settings.max_queued_requests
        )
        self._service.apply(self._start_options)
        make_actor = partial(
            get_or_create,
            context.app_name,
            settings.metrics_host,
            settings.metrics_port,
            with_vllm_names=settings.vllm_metric_names,
        )
        self._reporter = WorkerReporter(
            self._service,
            engine_loop,
            self._facts,
            make_actor,
            settings.model_name,
            settings.target_queue_s,
            self._start_options,
            rank,
            worker_info(config, self._facts),
        )
        self._is_running = False
        self._reporting = asyncio.create_task(self._reporter.run())
        self._reporting.add_done_callback(log_failure)

    async def reconfigure(self, user_config: Mapping[str, Any] | None, rank: ReplicaRank) -> None:
        """Called by Serve before the replica is ready, and whenever `user_config` or the rank changes.

        A running worker keeps the values that it has where it refuses new ones: if it raised, Serve would stop it, and
        its successors would not start either.
        """
        reporter = self._reporter
        try:
            options = self._start_options.with_user_config(user_config)
            self._service.apply(options)
        except LimitError as error:
            if not self._is_running:
                raise
            logger.error("user_config is refused, and what held before it goes on to hold: %s", error)
            reporter.is_user_config_refused = True
        else:
            if options != reporter.options:
                logger.info("live options: %s", options)
            reporter.options, reporter.is_user_config_refused = options, False
        self._is_running = True
        self._service.set_worker(rank.rank)
        reporter.rank = rank.rank

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Read by Serve every so often, where there is an autoscaler."""
        return self._reporter.report().as_stats()

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

    async def life(self, request_id: str, target_replica: str | None = None) -> LifeReport | None:
        return await self._service.life(request_id)

    async def describe(self, target_replica: str | None = None) -> ModelFacts:
        """Raises `WorkerDeadError` where requests would not be served."""
        self._service.check_health()
        return self._facts

    def record_replica_metadata(self) -> dict[str, Any]:
        """Read by Serve once, for this replica's router."""
        return {BLOCK_SIZE_KEY: self._facts.block_size}

    async def check_health(self) -> None:
        self._service.check_health()

    async def __del__(self) -> None:
        """Serve calls it after the drain, also for a replica whose start failed."""
        if hasattr(self, "_reporting"):
            self._reporting.cancel()
            await asyncio.gather(self._reporting, return_exceptions=True)
            await self._service.stop(self._settings.stop_timeout_s)
