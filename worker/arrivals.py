"""`Arrival`: a request on its way into the engine; `UnpreparedArrivals`: those that wait for their grammars.

The scheduler does not know of these yet, but they wait like all others, and the load says so. Used in the engine loop's
thread alone.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from worker.types import EngineLoad, EngineRequest

if TYPE_CHECKING:
    from worker.grammar.compiler import CompiledGrammar


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request arrives when it is submitted; that it is taken in only after the running step is part of its wait."""

    request: EngineRequest
    time_s: float
    grammar: "Future[CompiledGrammar] | None"


class UnpreparedArrivals:
    """By request id, each from `hold` to `take`."""

    def __init__(self) -> None:
        self._arrivals: dict[str, Arrival] = {}

    def hold(self, arrival: Arrival, prepared: Callable[[str], None]) -> bool:
        """Whether it has to wait; `prepared` is then called with its id, in any thread, when its grammar is compiled
        or cannot be."""
        request_id, grammar = arrival.request.request_id, arrival.grammar
        if grammar is None or grammar.done():
            return False
        self._arrivals[request_id] = arrival
        grammar.add_done_callback(lambda _: prepared(request_id))
        return True

    def take(self, request_id: str) -> Arrival | None:
        """It waits no longer; None if it did not."""
        return self._arrivals.pop(request_id, None)

    def added_to(self, load: EngineLoad) -> EngineLoad:
        """The engine's load and what waits here."""
        if not self._arrivals:
            return load
        num_tokens = sum(arrival.request.num_known_tokens for arrival in self._arrivals.values())
        return replace(
            load,
            num_waiting=load.num_waiting + len(self._arrivals),
            num_queued_tokens=load.num_queued_tokens + num_tokens,
        )
