"""The request router of the worker deployment: which replica takes a request.

It scores replicas by the work that frames reported and by this process's own bookings since (`router_state`). It
calls nobody and waits for nothing. Serve's controller imports this module: it loads no torch.

Serve pickles this module's globals by value and modules by name: the registry must be reached through its module,
or each handle would get a copy that nobody reports to.
"""

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from deployments import router_state
from worker.types import EngineRequest

#: the key of a worker's static facts, as the replica records them for its router
BLOCK_SIZE_KEY = "block_size"

Score = tuple[bool, bool, float, int]


class LoadRouter(RequestRouter):
    """Least work first, each replica a rank of its own (within a rank Serve would choose by its own count).
    Calls that are no requests go round.

    A call with `target_replica` goes to that replica while it lives; it is then idempotent and harmless elsewhere.
    """

    def initialize_state(self, decode_cost_tokens: float = 64.0, **_: Any) -> None:
        """`decode_cost_tokens`: queued prompt tokens that delay a newcomer as much as one held request does."""
        self._decode_cost_tokens = decode_cost_tokens
        self._turn = 0
        self._last_turn: dict[str, int] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None or not candidate_replicas:
            return []
        # Without it Serve asks again at once, in a loop without a pause, when every replica is full.
        pending_request.routing_context.should_backoff = True
        target = pending_request.kwargs.get("target_replica")
        for replica in candidate_replicas:
            if replica.replica_id.unique_id == target:
                return [[replica]]
        request = _request_of(pending_request)
        if request is None:
            ranked = sorted(candidate_replicas, key=self._turn_of)
        else:
            num_tokens = _num_known_tokens(request)
            ranked = sorted(candidate_replicas, key=lambda replica: self._score(replica, num_tokens))
            router_state.ROUTER_STATE.book(request.request_id, ranked[0].replica_id.unique_id, num_tokens)
        self._take_turn(ranked)
        return [[replica] for replica in ranked]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Serve may have passed over the first rank (gone, unreachable): the booking follows."""
        request = _request_of(pending_request)
        if request is not None:
            router_state.ROUTER_STATE.book(request.request_id, replica_id.unique_id, _num_known_tokens(request))

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve's word on who takes requests: one that left has been told to stop, or is dead."""
        before = {replica_id.unique_id for replica_id in self._replica_id_set}
        super().update_replicas(replicas)
        running = {replica.replica_id.unique_id for replica in replicas}
        router_state.ROUTER_STATE.replicas_changed(running, before - running)

    def _take_turn(self, ranked: list[RunningReplica]) -> None:
        self._turn += 1
        self._last_turn[ranked[0].replica_id.unique_id] = self._turn
        if len(self._last_turn) > len(ranked):
            living = {replica.replica_id.unique_id for replica in ranked}
            self._last_turn = {key: turn for key, turn in self._last_turn.items() if key in living}

    def _turn_of(self, replica: RunningReplica) -> int:
        return self._last_turn.get(replica.replica_id.unique_id, 0)

    def _score(self, replica: RunningReplica, num_tokens: int) -> Score:
        """Lower is better: silent or not, room for the prompt or not, work in tokens, whose turn is longest ago."""
        work = router_state.ROUTER_STATE.work(replica.replica_id.unique_id)
        num_queued_tokens = work.num_booked_tokens
        num_requests = work.num_booked_requests
        lacks_room = False
        if work.load is not None:
            num_queued_tokens += work.load.num_queued_tokens
            num_requests += work.load.num_waiting + work.load.num_running + work.load.num_swapped
            block_size = int(replica.replica_metadata.get(BLOCK_SIZE_KEY, 0))
            room_tokens = work.load.num_free_blocks * block_size
            lacks_room = block_size > 0 and room_tokens < work.num_booked_tokens + num_tokens
        cost = num_queued_tokens + num_requests * self._decode_cost_tokens
        return work.is_suspect, lacks_room, cost, self._turn_of(replica)


def _request_of(pending_request: PendingRequest) -> EngineRequest | None:
    argument = pending_request.args[0] if pending_request.args else None
    return argument if isinstance(argument, EngineRequest) else None


def _num_known_tokens(request: EngineRequest) -> int:
    return len(request.prompt_token_ids) + sum(len(token_ids) for token_ids in request.output_token_ids)
