"""`WorkerQueue`: how much may wait at one worker, and when a request that was turned away may find room.

Owns the limits, which may change at any time, and the measured rate at which its tokens are computed. Knows neither
frames nor the engine; time and load come in as arguments.
"""

from dataclasses import dataclass

from deployments.queue_outflow import QueueOutflow
from worker.types import EngineLoad

#: the least that is ever said
MIN_RETRY_AFTER_S = 1.0
#: what is foreseen further ahead is not worth a number
MAX_RETRY_AFTER_S = 60.0
#: measured rates are means over about so many seconds
RATE_MEMORY_S = 5.0


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """`max_queued_tokens`: prompt tokens that are not computed yet, those of a newcomer included.
    `max_queued_requests`: requests that are not admitted yet. 0: no limit."""

    max_queued_tokens: int
    max_queued_requests: int


class WorkerQueue:
    """Used on the event loop alone."""

    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        #: prompt tokens a second by which the queue shrinks while there is one; 0.0 before it was measured
        self.tokens_per_s = 0.0
        #: prompt tokens that left the queue a second, whether or not there was one
        self.done_tokens_per_s = 0.0
        self._outflow = QueueOutflow(RATE_MEMORY_S)
        self._num_taken_tokens = 0
        self._seen_s: float | None = None
        self._num_queued_tokens = 0
        self._num_done_tokens = 0

    def retry_after_s(self, num_tokens: int, load: EngineLoad) -> float | None:
        """None: a newcomer of `num_tokens` may come in. Else the seconds after which it may find room.

        Whatever its size, it may come into an empty queue.
        """
        wait_s = self._wait_for_tokens_s(num_tokens, load), self._wait_for_a_place_s(load)
        if wait_s == (None, None):
            return None
        # A queue in which nothing moved for so long will hardly do so sooner, whatever was measured before.
        longest_s = max(*(wait or 0.0 for wait in wait_s), self._outflow.stalled_s)
        return min(max(longest_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)

    def _wait_for_tokens_s(self, num_tokens: int, load: EngineLoad) -> float | None:
        """None: there is room."""
        max_queued_tokens = self.limits.max_queued_tokens
        if not max_queued_tokens or not load.num_queued_tokens:
            return None
        num_excess_tokens = load.num_queued_tokens + num_tokens - max_queued_tokens
        if num_excess_tokens <= 0:
            return None
        # A newcomer larger than the limit needs the queue to be empty, and no more than that.
        return self._time_of_s(min(num_excess_tokens, load.num_queued_tokens))

    def _wait_for_a_place_s(self, load: EngineLoad) -> float | None:
        """None: there is one. Places get free when requests are admitted, which may need others to end first; the
        tokens before the newcomer tell only where no admission was measured."""
        max_queued_requests = self.limits.max_queued_requests
        if not max_queued_requests or load.num_waiting < max_queued_requests:
            return None
        num_excess_requests = load.num_waiting - max_queued_requests + 1
        measured_s = self._outflow.wait_s(num_excess_requests)
        return measured_s or self._time_of_s(load.num_queued_tokens * num_excess_requests // load.num_waiting)

    def _time_of_s(self, num_tokens: int) -> float:
        """0.0 before the rate was measured."""
        return num_tokens / self.tokens_per_s if self.tokens_per_s else 0.0

    def took(self, num_tokens: int) -> None:
        """A request with so many known tokens came in."""
        self._num_taken_tokens += num_tokens
        self._outflow.took(num_tokens)

    def observe(self, now_s: float, load: EngineLoad) -> None:
        """Every so often: what left the queue since the last call, by whatever way, is what makes room in it."""
        self._outflow.observe(now_s, load)
        num_done_tokens = self._num_taken_tokens - load.num_queued_tokens
        if self._seen_s is not None and now_s > self._seen_s:
            elapsed_s = now_s - self._seen_s
            # A preempted answer comes back into the queue, which then grows without a newcomer.
            rate = max(num_done_tokens - self._num_done_tokens, 0) / elapsed_s
            weight = min(elapsed_s / RATE_MEMORY_S, 1.0)
            self.done_tokens_per_s += (rate - self.done_tokens_per_s) * weight
            # A queue that ended meanwhile tells only that the rate is no less.
            if self._num_queued_tokens and (load.num_queued_tokens or rate > self.tokens_per_s):
                self.tokens_per_s += (rate - self.tokens_per_s) * (weight if self.tokens_per_s else 1.0)
        self._seen_s = now_s
        self._num_queued_tokens = load.num_queued_tokens
        self._num_done_tokens = num_done_tokens
