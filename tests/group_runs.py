"""Runs of the real engine on requests of several answers."""

from collections.abc import Callable

from worker.engine import Engine
from worker.types import EngineRequest, TokenEvent


class Run:
    """Answers by (request, index). Request i arrives before step `arrival_steps[i]` (else at once); `hook` is called
    before each step. The block accounting is checked after each, and that each answer ends once."""

    def __init__(
        self,
        engine: Engine,
        requests: list[EngineRequest],
        hook: Callable[[int, "Run"], None] = lambda step, run: None,
        arrival_steps: list[int] | None = None,
    ) -> None:
        self.engine = engine
        self.answers: dict[tuple[str, int], list[int]] = {
            (request.request_id, index): [] for request in requests for index in request.open_samples
        }
        self.reasons: dict[tuple[str, int], str] = {}
        self.errors: dict[str, str] = {}
        self.cached: dict[str, int] = {}
        arrivals = arrival_steps or [0] * len(requests)
        step = 0
        while engine.has_unfinished() or step <= max(arrivals):
            for request, arrival in zip(requests, arrivals, strict=True):
                if arrival == step:
                    engine.add_request(request, float(step))
            hook(step, self)
            for event in engine.step(float(step)):
                self._take(event)
            engine.block_manager.check_integrity()
            step += 1
        engine.check_integrity()
        assert self.reasons.keys() == self.answers.keys()

    def _take(self, event: TokenEvent) -> None:
        key = (event.request_id, event.index)
        assert key not in self.reasons, "an event after the last one"
        self.answers[key] += event.token_ids
        if event.num_cached_tokens is not None:
            assert event.request_id not in self.cached
            self.cached[event.request_id] = event.num_cached_tokens
        if event.error is not None:
            self.errors[event.request_id] = event.error
        if event.finish_reason is not None:
            self.reasons[key] = event.finish_reason
