"""A router that knows nothing: what prefix affinity is measured against. Serve's controller imports it."""

import random

from ray.serve.request_router import RunningReplica

from deployments.router import LoadRouter
from worker.types import EngineRequest


class RandomRouter(LoadRouter):
    """Tells of replicas as the real one does; only the order in which it tries them is drawn."""

    def _rank(self, replicas: list[RunningReplica], request: EngineRequest) -> list[RunningReplica]:
        return random.sample(replicas, len(replicas))
