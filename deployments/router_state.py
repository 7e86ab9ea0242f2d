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
        self._replica_of: dict[str, str | None] = {}
        self._running_ids: set[str] = set()

    def open(self, request_id: str) -> None:
        """A stream begins. Only an open request can be booked, so a booking cannot outlive its stream."""
        with self._lock:
            self._replica_of[request_id] = None

    def book(self, request_id: str, replica_id: str, num_tokens: int) -> None:
        """`request_id` goes to `replica_id`; a booking elsewhere moves."""
        with self._lock:
            if request_id not in self._replica_of or self._replica_of[request_id] == replica_id:
                return
            self._leave(request_id)
            self._replica_of[request_id] = replica_id
            replica = self._replicas.setdefault(replica_id, _Replica())
            replica.open_request_ids.add(request_id)
            replica.bookings[request_id] = num_tokens

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
            self._replica_of.pop(request_id, None)

    def suspect(self, request_id: str) -> None:
        """The replica to which `request_id` went is silent: others are asked first for a while."""
        with self._lock:
            replica_id = self._replica_of.get(request_id)
            now = self._clock()
            recent = {key: since for key, since in self._suspect_since_s.items() if now - since < SUSPICION_S}
            self._suspect_since_s = recent if replica_id is None else {**recent, replica_id: now}

    def replicas_changed(self, running_ids: Iterable[str], left_ids: Iterable[str]) -> None:
        """Serve's list of replicas is `running_ids`; `left_ids` left it: they are told to stop, or dead."""
        with self._lock:
            self._running_ids = set(running_ids)

    def running_ids(self) -> list[str]:
        """The replicas in Serve's list."""
        with self._lock:
            return sorted(self._running_ids)

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
            return len(self._replica_of)

    def _leave(self, request_id: str) -> None:
        replica_id = self._replica_of.get(request_id)
        if replica_id is None:
            return
        replica = self._replicas[replica_id]
        replica.open_request_ids.discard(request_id)
        replica.bookings.pop(request_id, None)
        if not replica.open_request_ids:
            del self._replicas[replica_id]


ROUTER_STATE = RouterState()
