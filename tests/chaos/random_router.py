"""A router that knows nothing: what prefix affinity is measured against. Serve's controller imports it."""

import random
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class RandomRouter(RequestRouter):
    def initialize_state(self, **_: Any) -> None:
        """Nothing."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None or not candidate_replicas:
            return []
        pending_request.routing_context.should_backoff = True
        target = pending_request.kwargs.get("target_replica")
        pinned = [replica for replica in candidate_replicas if replica.replica_id.unique_id == target]
        return [[replica] for replica in pinned or random.sample(candidate_replicas, len(candidate_replicas))]
