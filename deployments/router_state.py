"""What this process knows of its streams and of the replicas that hold them: the registry between client and router.

Serve builds the request router itself, from a class and JSON, on a loop of its choosing; what the streams learn
reaches it through the one registry here, `ROUTER_STATE`. It is the one permitted module state, guarded by a lock.
It knows neither Serve nor the scoring.
"""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from deployments.prefix_index import PromptBlocks
from deployments.replica_view import ReplicaView, ReplicaWork
from worker.types import EngineLoad

#: replicas that were told to stop are remembered for the streams that reach them meanwhile
MAX_LEFT_REPLICAS = 1000


@dataclass(slots=True)
class _Stream:
    """`avoid`: replicas that come last for it. `reason`: why the router chose its replica. `num_expected_blocks`: so
    many blocks of the prompt should have been in that replica's cache when the request went there."""

    avoid: frozenset[str]
    on_left: Callable[[], None]
    blocks: PromptBlocks
    replica_id: str | None = None
    reason: str = "load"
    num_expected_blocks: int = 0


class RouterState:
    """Open streams, and what is known of replicas. A replica that has left is forgotten with its last stream."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._streams: dict[str, _Stream] = {}
        self._replicas: dict[str, ReplicaView] = {}
        self._running_ids: set[str] = set()
        #: a dict for its order
        self._left_ids: dict[str, None] = {}

    # -- what the client tells ------------------------------------------------------------------------------------

    def open(
        self,
        request_id: str,
        avoid: frozenset[str] = frozenset(),
        on_left: Callable[[], None] = lambda: None,
        blocks: PromptBlocks | None = None,
    ) -> None:
        """A stream begins. Only an open request can be booked, so a booking cannot outlive its stream.

        `on_left` is called, from any thread, when the replica that it went to is told to stop.
        """
        with self._lock:
            self._streams[request_id] = _Stream(avoid, on_left, blocks or PromptBlocks())

    def accepted(self, request_id: str, replica_id: str) -> str:
        """`replica_id` holds the request; why it was chosen. One that was told to stop meanwhile says so now."""
        self.book(request_id, replica_id, 0)
        with self._lock:
            stream = self._streams[request_id]
            has_left = replica_id in self._left_ids
        if has_left:
            stream.on_left()
        return stream.reason

    def report(self, request_id: str, replica_id: str, load: EngineLoad) -> None:
        """A frame of `request_id` brought the load of `replica_id`, which includes that request."""
        with self._lock:
            view = self._replicas.get(replica_id)
            if view is not None and request_id in view.open_request_ids:
                view.report(request_id, load, self._clock())

    def first_token(self, request_id: str, num_cached_tokens: int) -> None:
        """The request's prompt is computed; so many tokens of it were in the replica's cache."""
        with self._lock:
            stream = self._streams[request_id]
            if stream.replica_id is not None:
                keys, block_size = stream.blocks.keys, stream.blocks.block_size
                prefixes = self._replicas[stream.replica_id].prefixes
                prefixes.confirm(keys, stream.num_expected_blocks, num_cached_tokens // block_size)

    def suspect(self, request_id: str) -> None:
        """The replica to which `request_id` went is silent or gone: others are asked first for a while."""
        with self._lock:
            stream = self._streams.get(request_id)
            if stream is not None and stream.replica_id is not None:
                self._replicas[stream.replica_id].suspect_since_s = self._clock()

    def avoid(self, request_id: str) -> bool:
        """The replica that the request went to does not take it. Whether there is one that was not asked yet."""
        with self._lock:
            stream = self._streams[request_id]
            if stream.replica_id is not None:
                stream.avoid |= {stream.replica_id}
            return bool(self._running_ids - stream.avoid)

    def close(self, request_id: str) -> None:
        """The stream ended, however it ended."""
        with self._lock:
            self._leave(request_id)
            self._streams.pop(request_id, None)

    # -- what the router tells ------------------------------------------------------------------------------------

    def running_ids(self) -> list[str]:
        """The replicas in Serve's list."""
        with self._lock:
            return sorted(self._running_ids)

    def book(self, request_id: str, replica_id: str, num_tokens: int, reason: str = "load") -> None:
        """`request_id` goes to `replica_id`, which has `num_tokens` of it to compute; a booking elsewhere moves."""
        with self._lock:
            stream = self._streams.get(request_id)
            if stream is None or stream.replica_id == replica_id:
                return
            self._leave(request_id)
            view = self._replicas.setdefault(replica_id, ReplicaView())
            view.book(request_id, num_tokens, self._clock())
            stream.replica_id, stream.reason = replica_id, reason
            stream.num_expected_blocks = view.prefixes.num_computed(stream.blocks.keys)
            view.prefixes.send(stream.blocks.keys)

    def replicas_changed(self, running_ids: Iterable[str], left_ids: Iterable[str]) -> None:
        """Serve's list of replicas is `running_ids`; `left_ids` left it: they are told to stop, or dead."""
        with self._lock:
            self._running_ids = set(running_ids)
            streams: list[_Stream] = []
            for replica_id in left_ids:
                self._left_ids[replica_id] = None
                view = self._replicas.get(replica_id)
                if view is not None:
                    streams += [self._streams[request_id] for request_id in view.open_request_ids]
                    self._forget_if_gone(replica_id, view)
            while len(self._left_ids) > MAX_LEFT_REPLICAS:
                del self._left_ids[next(iter(self._left_ids))]
        for stream in streams:
            stream.on_left()

    # -- what they ask --------------------------------------------------------------------------------------------

    def work(self, replica_id: str, block_size: int = 1) -> ReplicaWork:
        with self._lock:
            view = self._replicas.get(replica_id)
            return ReplicaWork() if view is None else view.work(self._clock(), block_size)

    def num_cached_tokens(self, request_id: str, replica_id: str) -> int:
        """Tokens of the request's prompt that the replica is believed not to have to compute."""
        with self._lock:
            stream, view = self._streams.get(request_id), self._replicas.get(replica_id)
            if stream is None or view is None:
                return 0
            return view.prefixes.num_held(stream.blocks.keys) * stream.blocks.block_size

    def replica_of(self, request_id: str) -> str:
        """Where the request went; "" as long as it has not been routed."""
        with self._lock:
            return self._streams[request_id].replica_id or ""

    def avoided(self, request_id: str) -> frozenset[str]:
        with self._lock:
            stream = self._streams.get(request_id)
            return stream.avoid if stream is not None else frozenset()

    def has_running(self) -> bool:
        """Whether there is a replica that takes requests."""
        with self._lock:
            return bool(self._running_ids)

    @property
    def num_open_requests(self) -> int:
        with self._lock:
            return len(self._streams)

    def _leave(self, request_id: str) -> None:
        stream = self._streams.get(request_id)
        if stream is not None and stream.replica_id is not None:
            view = self._replicas[stream.replica_id]
            view.leave(request_id)
            self._forget_if_gone(stream.replica_id, view)
            stream.replica_id = None

    def _forget_if_gone(self, replica_id: str, view: ReplicaView) -> None:
        if replica_id in self._left_ids and not view.open_request_ids:
            del self._replicas[replica_id]


ROUTER_STATE = RouterState()
