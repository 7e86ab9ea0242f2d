"""`ReplicaView`: one replica as this process sees it: its newest report, what was sent there since, its cache.

Owns how fast that knowledge ages. Knows neither Serve nor the scoring. Time comes in as an argument.
"""

from dataclasses import dataclass, field
from math import exp

from deployments.prefix_index import PrefixIndex
from worker.types import EngineLoad

#: a report, or a booking that no report has confirmed, is believed in full for so long (two heartbeats) ...
FRESH_S = 1.0
#: ... and not at all from here on; in between its weight fades
STALE_S = 5.0
#: three heartbeats: a replica that holds a request and has said nothing for so long is asked last, before any stream's
#: own patience is over
SILENCE_S = 1.5
#: Serve's health checks find a worker that hangs in about this time; one that does not hang gets work again
SUSPICION_S = 15.0
#: what was sent to a replica counts as recent for about so long
RECENT_S = 30.0


@dataclass(frozen=True, slots=True)
class ReplicaWork:
    """A replica's work: its newest report and the bookings that the report cannot hold yet, as they have aged.

    `num_recent_tokens` and `num_recent_requests` were sent there lately, done or not. `num_free_tokens` is None where
    nothing was reported lately. `step_s` is what a step of fixed content takes there (0.0: not known). `is_suspect`: it
    kept a stream waiting too long a short while ago and has not reported since, or it holds a request and is silent.
    """

    num_queued_tokens: float = 0.0
    num_requests: float = 0.0
    num_recent_tokens: float = 0.0
    num_recent_requests: float = 0.0
    num_free_tokens: float | None = None
    step_s: float = 0.0
    is_suspect: bool = False


@dataclass(frozen=True, slots=True)
class _Booking:
    num_tokens: int
    time_s: float


@dataclass(slots=True)
class ReplicaView:
    """`bookings` hold, by request, the prompt tokens to be computed, until a report includes the request."""

    load: EngineLoad | None = None
    load_time_s: float = 0.0
    suspect_since_s: float | None = None
    bookings: dict[str, _Booking] = field(default_factory=dict)
    open_request_ids: set[str] = field(default_factory=set)
    prefixes: PrefixIndex = field(default_factory=PrefixIndex)
    recent_tokens: float = 0.0
    recent_requests: float = 0.0
    recent_time_s: float = 0.0

    def book(self, request_id: str, num_tokens: int, now: float) -> None:
        self.open_request_ids.add(request_id)
        self.bookings[request_id] = _Booking(num_tokens, now)
        keep = exp((self.recent_time_s - now) / RECENT_S)
        self.recent_tokens = keep * self.recent_tokens + num_tokens
        self.recent_requests = keep * self.recent_requests + 1
        self.recent_time_s = now

    def report(self, request_id: str, load: EngineLoad, now: float) -> None:
        """The load includes the request."""
        self.suspect_since_s = None
        self.load, self.load_time_s = load, now
        self.bookings.pop(request_id, None)
        self.prefixes.capacity = load.num_free_blocks + load.num_used_blocks

    def leave(self, request_id: str) -> None:
        """The stream is over, or went elsewhere."""
        self.open_request_ids.discard(request_id)
        booking = self.bookings.pop(request_id, None)
        if booking is not None:
            # No report of it: most likely it was never there.
            self.recent_tokens = max(self.recent_tokens - booking.num_tokens, 0.0)
            self.recent_requests = max(self.recent_requests - 1, 0.0)

    def work(self, now: float, block_size: int) -> ReplicaWork:
        num_tokens = num_requests = 0.0
        for booking in self.bookings.values():
            weight = _weight(now - booking.time_s)
            num_tokens += weight * booking.num_tokens
            num_requests += weight
        num_booked_tokens = num_tokens
        num_free_tokens: float | None = None
        step_s = 0.0
        if self.load is not None:
            load, weight = self.load, _weight(now - self.load_time_s)
            num_tokens += weight * load.num_queued_tokens
            num_requests += weight * (load.num_waiting + load.num_running + load.num_swapped)
            if weight > 0.0:
                num_free_tokens = load.num_free_blocks * block_size - num_booked_tokens
            step_s = load.reference_step_s
        is_suspect = self.suspect_since_s is not None and now - self.suspect_since_s < SUSPICION_S
        is_suspect |= self._is_silent(now)
        keep = exp((self.recent_time_s - now) / RECENT_S)
        return ReplicaWork(
            num_tokens,
            num_requests,
            keep * self.recent_tokens,
            keep * self.recent_requests,
            num_free_tokens,
            step_s,
            is_suspect,
        )

    def _is_silent(self, now: float) -> bool:
        if not self.open_request_ids:
            return False
        # It need say nothing before the first request that it has not spoken of came.
        spoke_s = max(self.load_time_s, min((booking.time_s for booking in self.bookings.values()), default=0.0))
        return now - spoke_s > SILENCE_S


def _weight(age_s: float) -> float:
    return min(max((STALE_S - age_s) / (STALE_S - FRESH_S), 0.0), 1.0)
