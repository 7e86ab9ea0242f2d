"""The request router of the worker deployment: which replica takes a request.

It scores replicas by the work that frames reported, by this process's own bookings since and by what their caches
are believed to hold (`router_state`). It calls nobody and waits for nothing. Serve's controller imports this module:
it loads no torch.

Serve pickles this module's globals by value and modules by name: the registry must be reached through its module,
or each handle would get a copy that nobody reports to.
"""

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any
from uuid import uuid4

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from deployments import router_state
from worker.types import EngineRequest

#: the key of a worker's static facts, as the replica records them for its router
BLOCK_SIZE_KEY = "block_size"

#: a worker whose steps take less than so many times those of the fastest counts as being as fast: measurements differ
MIN_SLOWNESS = 1.5
#: and none as slower than so many times: what a step of a fixed content takes is foreseen from steps of little content,
#: and a hiccup among them must not keep a worker without requests, which alone could correct it
MAX_SLOWNESS = 8.0
#: how much a prompt's tokens count again, beside their own delay: they delay who comes later, and take the place of
#: blocks that others may want
OTHERS_WEIGHT = 1.0
#: how much work that was sent lately, and is mostly done, counts beside work that is still to be done: it levels the
#: shares of workers over time where prefixes or small loads leave a choice
RECENT_WEIGHT = 1.0
#: replicas whose costs differ by less, as a share of the lowest or in tokens, are as good as each other: what is known
#: of them is a little old. The one whose cache holds more of the prompt is chosen, or else they take turns, since every
#: ingress replica would choose the same one
NEAR_SHARE = 0.05
NEAR_TOKENS = 32.0


@dataclass(frozen=True, slots=True)
class _Score:
    """Lower is better: `last_resorts` (what speaks against the replica, gravest first), then `cost` in tokens."""

    replica: RunningReplica
    last_resorts: tuple[bool, bool, bool]
    cost: float
    num_new_tokens: int


class LoadRouter(RequestRouter):
    """The shortest delay first: what the replica has to compute before and for this prompt, by its speed. Each replica
    is a rank of its own (within a rank Serve would choose by its own count). Calls that are no requests go round.

    A call with `target_replica` goes to that replica while it answers; it is idempotent, and harmless elsewhere.
    """

    def initialize_state(self, decode_cost_tokens: float = 64.0, **_: Any) -> None:
        """`decode_cost_tokens`: queued prompt tokens that delay a newcomer as much as one held request does."""
        self._decode_cost_tokens = decode_cost_tokens
        self._turn = 0
        #: other processes' routers start elsewhere in the round
        self._phase = uuid4().bytes
        self._last_turn: dict[str, int] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None or not candidate_replicas:
            return []
        # Without it Serve asks again at once, in a loop without a pause, when every replica is full.
        pending_request.routing_context.should_backoff = True
        target = pending_request.kwargs.get("target_replica")
        if any(_id_of(replica) == target for replica in candidate_replicas):
            # Never it alone: while it does not answer, the call would hold one of Serve's few routing tasks.
            ranked = sorted(candidate_replicas, key=lambda replica: _id_of(replica) != target)
            return [[replica] for replica in ranked]
        request = _request_of(pending_request)
        if request is None:
            ranked = sorted(candidate_replicas, key=self._turn_of)
        else:
            ranked = self._rank(candidate_replicas, request)
        self._take_turn(ranked)
        return [[replica] for replica in ranked]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Serve may have passed over the first rank (gone, unreachable): the booking follows."""
        request = _request_of(pending_request)
        if request is not None:
            state, unique_id = router_state.ROUTER_STATE, replica_id.unique_id
            num_cached_tokens = state.num_cached_tokens(request.request_id, unique_id)
            state.book(request.request_id, unique_id, max(_num_known_tokens(request) - num_cached_tokens, 1))

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve's word on who takes requests: one that left has been told to stop, or is dead."""
        before = {replica_id.unique_id for replica_id in self._replica_id_set}
        super().update_replicas(replicas)
        running = {_id_of(replica) for replica in replicas}
        router_state.ROUTER_STATE.replicas_changed(running, before - running)

    def _rank(self, replicas: list[RunningReplica], request: EngineRequest) -> list[RunningReplica]:
        """Best first, and the best one booked."""
        scores = self._scores(replicas, request)
        least = min(scores, key=lambda score: (score.last_resorts, score.cost)).cost
        near = least + max(NEAR_SHARE * least, NEAR_TOKENS)
        scores.sort(
            key=lambda score: (
                score.last_resorts,
                0.0 if score.cost <= near else score.cost,
                score.num_new_tokens // NEAR_TOKENS,
                self._turn_of(score.replica),
            )
        )
        best = scores[0]
        reason = "only" if len(scores) == 1 else "load"
        if best.num_new_tokens < max(score.num_new_tokens for score in scores):
            reason = "prefix"
        router_state.ROUTER_STATE.book(request.request_id, _id_of(best.replica), best.num_new_tokens, reason)
        return [score.replica for score in scores]

    def _scores(self, replicas: list[RunningReplica], request: EngineRequest) -> list[_Score]:
        state = router_state.ROUTER_STATE
        num_tokens = _num_known_tokens(request)
        avoided = state.avoided(request.request_id)
        works = [
            state.work(_id_of(replica), int(replica.replica_metadata.get(BLOCK_SIZE_KEY, 0))) for replica in replicas
        ]
        fastest_s = min((work.step_s for work in works if work.step_s > 0.0), default=0.0)
        scores = []
        for replica, work in zip(replicas, works, strict=True):
            # At least the last token is computed, whatever is cached.
            num_new = max(num_tokens - state.num_cached_tokens(request.request_id, _id_of(replica)), 1)
            lacks_room = work.num_free_tokens is not None and work.num_free_tokens < num_new
            num_ahead = work.num_queued_tokens + work.num_requests * self._decode_cost_tokens
            num_recent = work.num_recent_tokens + work.num_recent_requests * self._decode_cost_tokens
            slowness = min(work.step_s / fastest_s, MAX_SLOWNESS) if work.step_s > 0.0 else 1.0
            cost = (num_ahead + RECENT_WEIGHT * num_recent + num_new) * (slowness if slowness >= MIN_SLOWNESS else 1.0)
            cost += OTHERS_WEIGHT * num_new
            scores.append(_Score(replica, (_id_of(replica) in avoided, work.is_suspect, lacks_room), cost, num_new))
        return scores

    def _take_turn(self, ranked: list[RunningReplica]) -> None:
        self._turn += 1
        self._last_turn[_id_of(ranked[0])] = self._turn
        if len(self._last_turn) > len(ranked):
            living = {_id_of(replica) for replica in ranked}
            self._last_turn = {key: turn for key, turn in self._last_turn.items() if key in living}

    def _turn_of(self, replica: RunningReplica) -> tuple[int, bytes]:
        """When it had its last turn; those that had none are in an order of this router's own."""
        unique_id = _id_of(replica)
        turn = self._last_turn.get(unique_id, 0)
        return turn, b"" if turn else blake2b(unique_id.encode(), key=self._phase).digest()


def _id_of(replica: RunningReplica) -> str:
    return replica.replica_id.unique_id


def _request_of(pending_request: PendingRequest) -> EngineRequest | None:
    argument = pending_request.args[0] if pending_request.args else None
    return argument if isinstance(argument, EngineRequest) else None


def _num_known_tokens(request: EngineRequest) -> int:
    return len(request.prompt_token_ids) + sum(len(token_ids) for token_ids in request.output_token_ids)
