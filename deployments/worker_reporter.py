"""`WorkerReporter`: what one worker tells the metrics actor, about once a second and at once on turning idle.

Owns when to report and under which rank. A worker that would not serve requests reports nothing, so that it shows as
down. Knows no options and no Serve.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from deployments.engine_seam import Loop
from deployments.live_options import LiveOptions
from deployments.metrics_push import PUSH_PERIOD_S, MetricsPusher
from deployments.model_facts import ModelFacts
from deployments.scaling import WorkerReport
from deployments.worker_service import WorkerDeadError, WorkerService
from monitoring.accumulator import Snapshot
from monitoring.step_feed import Row, rows_of
from monitoring.worker_metrics import WorkerMetrics

logger = logging.getLogger(__name__)

#: how often a worker whose streams have all ended is asked whether it still holds anything
_IDLE_POLL_S = 0.05
#: later than it should be by so much, this process was frozen ...
_FROZEN_S = 1.0
#: ... and its callers have given up: what they cancelled meanwhile is dropped within this time
_SETTLE_S = 0.5


class WorkerReporter:
    """`make_actor` returns the metrics actor's handle; it may block. `info`: what the worker runs, for the metrics."""

    def __init__(
        self,
        service: WorkerService,
        engine_loop: Loop,
        facts: ModelFacts,
        make_actor: Callable[[], Any],
        model_name: str,
        target_queue_s: float,
        options: LiveOptions,
        rank: int,
        info: Mapping[str, str] | None = None,
    ) -> None:
        self._service = service
        self._engine_loop = engine_loop
        self._facts = facts
        self._make_actor = make_actor
        self._model_name = model_name
        self._target_queue_s = target_queue_s
        self._info = info
        self._metrics: WorkerMetrics | None = None
        self._last_shown_step_id = -1
        #: these three may change at any time
        self.options = options
        self.rank = rank
        self.is_user_config_refused = False

    async def run(self) -> None:
        """Reports until it is cancelled, and says goodbye then: a worker that ends on purpose is not down."""
        actor = await asyncio.to_thread(self._make_actor)
        pusher: MetricsPusher | None = None
        rank: int | None = None
        try:
            while True:
                if pusher is None or rank != self.rank:
                    if pusher is not None:
                        pusher.say_goodbye()
                    rank = self.rank
                    self._count_from_zero()
                    pusher = MetricsPusher(actor, f"worker-{rank}")
                await self._report(pusher)
        finally:
            if pusher is not None:
                pusher.say_goodbye()

    async def _report(self, pusher: MetricsPusher) -> None:
        """Once, unless nothing is to be reported, and then until the next time."""
        try:
            self._service.check_health()
        except WorkerDeadError as error:
            logger.error("this worker does not report: %s", error)
            await asyncio.sleep(PUSH_PERIOD_S)
            return
        await pusher.push(self._snapshot())
        if rows := self._new_rows():
            await pusher.push_steps(str(self.rank), rows)
        await self._next_report()

    def _new_rows(self) -> list[Row]:
        """Of the steps that have ended since the last call."""
        records = [
            record
            for record in self._engine_loop.records_since(self._last_shown_step_id)
            if record.duration_s is not None
        ]
        if records:
            self._last_shown_step_id = records[-1].step_id
        return rows_of(records, time.monotonic())

    def _count_from_zero(self) -> None:
        """What was counted under another rank stays with it."""
        last_step_id = -1 if self._metrics is None else self._metrics.last_step_id
        self._metrics = WorkerMetrics(
            self._model_name,
            self.rank,
            last_step_id,
            block_size=self._facts.block_size,
            block_bytes=self._facts.num_block_bytes,
        )
        if self._info is not None:
            self._metrics.tell(self._info)
        self._metrics.set_pool_sizes(
            num_device_blocks=self._facts.num_device_blocks, num_host_blocks=self._facts.num_host_blocks
        )
        self._metrics.set_swap_bandwidth(
            out_bytes_per_s=self._facts.swap_out_bytes_per_s, in_bytes_per_s=self._facts.swap_in_bytes_per_s
        )

    def report(self) -> WorkerReport:
        """For the autoscaler."""
        load = self._engine_loop.status().load
        queue = self._service.queue
        return WorkerReport(
            num_queued_tokens=load.num_queued_tokens,
            tokens_per_s=queue.tokens_per_s,
            done_tokens_per_s=queue.done_tokens_per_s,
            num_held_requests=load.num_waiting + load.num_running + load.num_swapped,
            max_num_seqs=self._engine_loop.limits.max_num_seqs,
        )

    def _snapshot(self) -> Snapshot:
        metrics = self._metrics
        assert metrics is not None
        metrics.fold(self._engine_loop.records_since(metrics.last_step_id))
        load = self._engine_loop.status().load
        metrics.set_load(
            num_waiting=load.num_waiting,
            num_running=load.num_running,
            num_swapped=load.num_swapped,
            num_used_device_blocks=load.num_used_blocks,
            num_used_host_blocks=load.num_used_host_blocks,
            num_cached_device_blocks=load.num_cached_blocks,
        )
        metrics.set_options(self.options.values(), is_refused=self.is_user_config_refused)
        report = self.report()
        metrics.set_demand(tokens=report.token_demand(self._target_queue_s), sequences=report.sequence_demand())
        return metrics.snapshot()

    async def _next_report(self) -> None:
        """Returns after a period, or as soon as the worker has turned idle: its gauges must not freeze. One that was
        frozen itself first drops what nobody waits for any more: if it ends now, its last report stays for a while."""
        due_s = time.monotonic() + PUSH_PERIOD_S
        await self._period_or_idle()
        frozen_s = time.monotonic() - due_s
        if frozen_s > _FROZEN_S:
            logger.warning("this worker was frozen for about %.1f s", frozen_s)
            await asyncio.sleep(_SETTLE_S)

    async def _period_or_idle(self) -> None:
        try:
            async with asyncio.timeout(PUSH_PERIOD_S):
                await self._service.streams_ended.wait()
                self._service.streams_ended.clear()
                await asyncio.sleep(_IDLE_POLL_S)
                while not self._service.is_idle():
                    await asyncio.sleep(_IDLE_POLL_S)
        except TimeoutError:
            return
