"""`QueueOutflow`: how often requests leave a worker's queue, and for how long nothing has.

Owns the counts of what came and went. Knows no limits. That slots, blocks or the token budget is what is missing makes
no difference here: all of them show as time in which nothing leaves.
"""

from worker.types import EngineLoad


class _Departures:
    """Counts what leaves for the first time: what preemption puts back was counted when it left.

    What came in since the last look may not stand in the load yet; it counts as come from the next look on.
    """

    def __init__(self) -> None:
        self._num_taken = 0
        self._num_seen = 0
        self._num_left = 0

    def took(self, num: int) -> None:
        self._num_taken += num

    def look(self, num_queued: int, *, was_empty: bool) -> int:
        """How much has left since the last look; 0 where there was no queue to leave."""
        num_left = (self._num_taken if was_empty else self._num_seen) - num_queued
        num_new = max(num_left - self._num_left, 0)
        self._num_seen = self._num_taken
        self._num_left += num_new
        return 0 if was_empty else num_new


class QueueOutflow:
    """`interval_s`: between departures of requests while some wait; `num_at_once`: how many then leave together. Both
    are means in which each wait counts by its length, over about `memory_s`; 0.0 before any was measured. `stalled_s`:
    for how long a queue is there and neither a request nor a token has left it."""

    def __init__(self, memory_s: float) -> None:
        self._memory_s = memory_s
        self.interval_s = 0.0
        self.num_at_once = 0.0
        self.stalled_s = 0.0
        self._requests = _Departures()
        self._tokens = _Departures()
        self._was_without_requests = True
        self._was_without_tokens = True
        #: the last departure of a request, and of anything, or when the queue began
        self._departed_s = 0.0
        self._shrank_s = 0.0

    def took(self, num_tokens: int) -> None:
        self._requests.took(1)
        self._tokens.took(num_tokens)

    def observe(self, now_s: float, load: EngineLoad) -> None:
        num_requests = self._requests.look(load.num_waiting, was_empty=self._was_without_requests)
        num_tokens = self._tokens.look(load.num_queued_tokens, was_empty=self._was_without_tokens)
        if num_requests:
            self._learn(now_s - self._departed_s, num_requests)
        if num_requests or self._was_without_requests:
            self._departed_s = now_s
        if num_requests or num_tokens or (self._was_without_requests and self._was_without_tokens):
            self._shrank_s = now_s
        self._was_without_requests = load.num_waiting == 0
        self._was_without_tokens = load.num_queued_tokens == 0
        self.stalled_s = now_s - self._shrank_s

    def _learn(self, interval_s: float, num_requests: int) -> None:
        weight = min(interval_s / self._memory_s, 1.0) if self.interval_s else 1.0
        self.interval_s += (interval_s - self.interval_s) * weight
        self.num_at_once += (num_requests - self.num_at_once) * weight

    def wait_s(self, num_requests: int) -> float:
        """Until so many more have left."""
        return self.interval_s * max(num_requests / self.num_at_once, 1.0) if self.interval_s else 0.0
