"""What this process knows about each worker's load: what frames reported, and what it booked since.

Serve builds the request router itself, from a class and JSON, on a loop of its choosing; what the streams learn
reaches it through the one registry here, `ROUTER_STATE`. It is the one permitted module state, guarded by a lock.
It knows neither Serve nor the scoring.
"""

import threading
from dataclasses import dataclass, field

from worker.types import EngineLoad


@dataclass(frozen=True, slots=True)
class ReplicaWork:
    """A replica's work as seen from here: its newest report and the bookings that the report cannot hold yet."""

    load: EngineLoad | None = None
    num_booked_requests: int = 0
    num_booked_tokens: int = 0


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

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._replicas: dict[str, _Replica] = {}
        self._replica_of: dict[str, str | None] = {}

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
            replica.load = load
            replica.bookings.pop(request_id, None)

    def close(self, request_id: str) -> None:
        """The stream ended, however it ended."""
        with self._lock:
            self._leave(request_id)
            self._replica_of.pop(request_id, None)

    def work(self, replica_id: str) -> ReplicaWork:
        with self._lock:
            replica = self._replicas.get(replica_id)
            if replica is None:
                return ReplicaWork()
            return ReplicaWork(replica.load, len(replica.bookings), sum(replica.bookings.values()))

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
