"""What this process knows about each worker's load: what frames reported, and what it booked since.

Serve builds the request router itself, from a class and JSON, on a loop of its choosing; what the streams learn
reaches it through the one registry here, `ROUTER_STATE`. It is the one permitted module state, guarded by a lock.
It knows neither Serve nor the scoring.
"""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from worker.types import EngineLoad

#: Serve's health checks find a worker that hangs in about this time; one that does not hang gets work again
SUSPICION_S = 15.0
#: replicas that were told to stop are remembered for the streams that reach them meanwhile
MAX_LEFT_REPLICAS = 1000


@dataclass(frozen=True, slots=True)
class ReplicaWork:
    """A replica's work as seen from here: its newest report and the bookings that the report cannot hold yet.

    `is_suspect`: it kept a stream waiting too long a short while ago, and has not reported since.
    """

    load: EngineLoad | None = None
    num_booked_requests: int = 0
    num_booked_tokens: int = 0
    is_suspect: bool = False


@dataclass(slots=True)
class _Replica:
    load: EngineLoad | None = None
    #: request id -> prompt tokens, until a report of the replica includes the request
    bookings: dict[str, int] = field(default_factory=dict)
    open_request_ids: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Open:
    """A stream. `avoid`: replicas that come last for it. `reason`: why the router chose its replica."""

    avoid: frozenset[str]
    on_left: Callable[[], None]
    replica_id: str | None = None
    reason: str = "load"


class RouterState:
    """Open requests and the replicas that hold them.

    A replica is known only while a stream of this process is open on it: a report without a stream to renew it
    would be believed for ever, so the last stream takes it along.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._suspect_since_s: dict[str, float] = {}
        self._replicas: dict[str, _Replica] = {}
        self._open: dict[str, _Open] = {}
        self._running_ids: set[str] = set()
        #: a dict for its order
        self._left_ids: dict[str, None] = {}

    def open(
        self, request_id: str, avoid: frozenset[str] = frozenset(), on_left: Callable[[], None] = lambda: None
    ) -> None:
        """A stream begins. Only an open request can be booked, so a booking cannot outlive its stream.

        `on_left` is called, from any thread, when the replica that it went to is told to stop.
        """
        with self._lock:
            self._open[request_id] = _Open(avoid, on_left)

    def book(self, request_id: str, replica_id: str, num_tokens: int, reason: str = "load") -> None:
        """`request_id` goes to `replica_id`; a booking elsewhere moves."""
        with self._lock:
            stream = self._open.get(request_id)
            if stream is None or stream.replica_id == replica_id:
                return
            self._leave(request_id)
            stream.replica_id, stream.reason = replica_id, reason
            replica = self._replicas.setdefault(replica_id, _Replica())
            replica.open_request_ids.add(request_id)
            replica.bookings[request_id] = num_tokens

    def accepted(self, request_id: str, replica_id: str) -> str:
        """`replica_id` holds the request; why it was chosen. One that was told to stop meanwhile says so now."""
        self.book(request_id, replica_id, 0)
        with self._lock:
            stream = self._open[request_id]
            has_left = replica_id in self._left_ids
        if has_left:
            stream.on_left()
        return stream.reason

    def replica_of(self, request_id: str) -> str:
        """Where the request went; "" as long as it has not been routed."""
        with self._lock:
            return self._open[request_id].replica_id or ""

    def avoid(self, request_id: str) -> bool:
        """The replica that the request went to does not take it. Whether there is one that was not asked yet."""
        with self._lock:
            stream = self._open[request_id]
            if stream.replica_id is not None:
                stream.avoid |= {stream.replica_id}
            return bool(self._running_ids - stream.avoid)

    def has_running(self) -> bool:
        """Whether there is a replica that takes requests."""
        with self._lock:
            return bool(self._running_ids)

    def avoided(self, request_id: str) -> frozenset[str]:
        with self._lock:
            stream = self._open.get(request_id)
            return stream.avoid if stream is not None else frozenset()

    def replicas_changed(self, running_ids: Iterable[str], left_ids: Iterable[str]) -> None:
        """Serve's list of replicas is `running_ids`; `left_ids` left it: they are told to stop, or dead."""
        with self._lock:
            self._running_ids = set(running_ids)
            streams: list[_Open] = []
            for replica_id in left_ids:
                self._left_ids[replica_id] = None
                replica = self._replicas.get(replica_id)
                if replica is not None:
                    streams += [self._open[request_id] for request_id in replica.open_request_ids]
            while len(self._left_ids) > MAX_LEFT_REPLICAS:
                del self._left_ids[next(iter(self._left_ids))]
        for stream in streams:
            stream.on_left()

    def report(self, request_id: str, replica_id: str, load: EngineLoad) -> None:
        """A frame of `request_id` brought the load of `replica_id`, which includes that request."""
        with self._lock:
            replica = self._replicas.get(replica_id)
            if replica is None or request_id not in replica.open_request_ids:
                return
            self._suspect_since_s.pop(replica_id, None)
            replica.load = load
            replica.bookings.pop(request_id, None)

    def close(self, request_id: str) -> None:
        """The stream ended, however it ended."""
        with self._lock:
            self._leave(request_id)
            self._open.pop(request_id, None)

    def suspect(self, request_id: str) -> None:
        """The replica to which `request_id` went is silent: others are asked first for a while."""
        with self._lock:
            stream = self._open.get(request_id)
            replica_id = None if stream is None else stream.replica_id
            now = self._clock()
            recent = {key: since for key, since in self._suspect_since_s.items() if now - since < SUSPICION_S}
            self._suspect_since_s = recent if replica_id is None else {**recent, replica_id: now}

    def work(self, replica_id: str) -> ReplicaWork:
        with self._lock:
            since_s = self._suspect_since_s.get(replica_id)
            is_suspect = since_s is not None and self._clock() - since_s < SUSPICION_S
            replica = self._replicas.get(replica_id)
            if replica is None:
                return ReplicaWork(is_suspect=is_suspect)
            bookings = replica.bookings
            return ReplicaWork(replica.load, len(bookings), sum(bookings.values()), is_suspect)

    @property
    def num_open_requests(self) -> int:
        with self._lock:
            return len(self._open)

    def _leave(self, request_id: str) -> None:
        stream = self._open.get(request_id)
        if stream is None or stream.replica_id is None:
            return
        replica_id = stream.replica_id
        replica = self._replicas[replica_id]
        replica.open_request_ids.discard(request_id)
        replica.bookings.pop(request_id, None)
        if not replica.open_request_ids:
            del self._replicas[replica_id]


ROUTER_STATE = RouterState()
