"""What a worker's `generate` stream carries to the ingress: lists of plain frames.

The first frame of a stream is `Accepted`, sent at once, or `Overloaded` and nothing else. Then come `Tokens`, and a
`Heartbeat` at least every `HEARTBEAT_S` while there is nothing else to say. A missing frame is a stall; missing
tokens are not.
"""

from dataclasses import dataclass

from worker.types import EngineLoad, TokenEvent

HEARTBEAT_S = 0.5


@dataclass(frozen=True, slots=True)
class Accepted:
    """The worker holds the request. `worker` is the replica's rank, `replica_id` Serve's unique id of it."""

    worker: int
    replica_id: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token events of this request, in order, with the load of the worker after that step."""

    events: list[TokenEvent]
    load: EngineLoad


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The worker lives. `step_age_s` is how long the step now running has run (0.0 between steps)."""

    step_id: int
    step_age_s: float
    load: EngineLoad


@dataclass(frozen=True, slots=True)
class Overloaded:
    """In place of `Accepted`, and the stream's only frame: the worker's queue is full. It may have room for the
    request in `retry_after_s` seconds."""

    retry_after_s: float
    load: EngineLoad


Frame = Accepted | Overloaded | Tokens | Heartbeat
