"""`WorkerQueue`: how much may wait at one worker, and when a request that was turned away may find room.

Owns the limits, which may change at any time, and the measured rate at which the queue shrinks. Knows neither frames
nor the engine; time and load come in as arguments.
"""

from dataclasses import dataclass

from worker.types import EngineLoad

#: before the rate was measured, and the least that is ever said
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
        self._num_taken_tokens = 0
        self._seen_s: float | None = None
        self._num_queued_tokens = 0
        self._num_done_tokens = 0

    def retry_after_s(self, num_tokens: int, load: EngineLoad) -> float | None:
        """None: a newcomer of `num_tokens` may come in. Else the seconds after which it may find room.

        Whatever its size, it may come into an empty queue.
        """
        limits = self.limits
        num_excess_tokens = 0
        if limits.max_queued_tokens and load.num_queued_tokens:
            num_excess_tokens = max(load.num_queued_tokens + num_tokens - limits.max_queued_tokens, 0)
        if limits.max_queued_requests and load.num_waiting >= limits.max_queued_requests:
            num_excess_requests = load.num_waiting - limits.max_queued_requests + 1
            num_ahead = load.num_queued_tokens * num_excess_requests // load.num_waiting
            num_excess_tokens = max(num_excess_tokens, num_ahead, 1)
        if num_excess_tokens == 0:
            return None
        if self.tokens_per_s == 0.0:
            return MIN_RETRY_AFTER_S
        # A newcomer larger than the limit needs the queue to be empty, and no more than that.
        wait_s = min(num_excess_tokens, max(load.num_queued_tokens, 1)) / self.tokens_per_s
        return min(max(wait_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)

    def took(self, num_tokens: int) -> None:
        """A request with so many known tokens came in."""
        self._num_taken_tokens += num_tokens

    def observe(self, now_s: float, load: EngineLoad) -> None:
        """Every so often: what left the queue since the last call, by whatever way, is what makes room in it."""
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
