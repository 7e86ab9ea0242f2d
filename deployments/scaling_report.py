"""`ScalingReport`: tells the metrics actor what the autoscaler chose. Lives in Serve's controller, which must not wait.

Owns how often it tells, and on which thread. Knows neither how the number was chosen nor what is done with it.
"""

import logging
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import ray

from deployments.metrics_push import PUSH_PERIOD_S
from monitoring.accumulator import Snapshot
from monitoring.metrics_actor import NAMESPACE, actor_name

logger = logging.getLogger(__name__)

SOURCE = "autoscaler"


def metrics_actor_of(app_name: str) -> Any:
    """Raises ValueError where there is none (yet). Asks Ray, which takes a moment."""
    return ray.get_actor(actor_name(app_name), namespace=NAMESPACE)


class ScalingReport:
    """At most once a second, and never while the one before is on its way: metrics never disturb scaling."""

    def __init__(
        self,
        find_actor: Callable[[str], Any] = metrics_actor_of,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._find_actor = find_actor
        self._clock = clock
        self._epoch = uuid.uuid4().hex
        self._due_s = float("-inf")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scaling-report")
        self._on_its_way: Future[None] | None = None
        self._is_failing = False

    @property
    def is_due(self) -> bool:
        return self._clock() >= self._due_s and (self._on_its_way is None or self._on_its_way.done())

    def push(self, app_name: str, snapshot: Snapshot) -> None:
        """Returns at once. A failure is logged when it begins."""
        self._due_s = self._clock() + PUSH_PERIOD_S
        self._on_its_way = self._thread.submit(self._push, app_name, snapshot)

    def wait(self) -> None:
        """Until what was pushed last has been handed over."""
        if self._on_its_way is not None:
            self._on_its_way.result()

    def _push(self, app_name: str, snapshot: Snapshot) -> None:
        try:
            # Looked up each time: the actor goes with its application and comes with the next one.
            self._find_actor(app_name).push.remote(SOURCE, self._epoch, snapshot)
        except Exception as error:
            if not self._is_failing:
                logger.warning("the autoscaler's state is not delivered: %r", error)
            self._is_failing = True
        else:
            self._is_failing = False
