"""A worker client without workers: answers every request with the ids it was given, frame by frame, and keeps book
of what it was told."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

from deployments.frames import Accepted, Frame, Heartbeat, Tokens
from worker.types import EngineLoad, EngineRequest, TokenEvent, TokenLogprobs

LOAD = EngineLoad(
    num_waiting=0, num_running=1, num_swapped=0, num_queued_tokens=0, num_free_blocks=9, num_used_blocks=1
)


@dataclass
class FakeWorker:
    """`answer_ids` are produced `tokens_per_frame` a frame, then `stop_token_id` unless EOS is ignored; again
    and again if `is_endless`. `error` is raised, or `engine_error` reported, after `fail_after` tokens."""

    answer_ids: list[int] = field(default_factory=list)
    stop_token_id: int | None = None
    tokens_per_frame: int = 1
    delay_s: float = 0.0
    error: Exception | None = None
    engine_error: str | None = None
    fail_after: int = 0
    reject: Exception | None = None
    logprob: float = -0.5
    is_endless: bool = False
    requests: list[EngineRequest] = field(default_factory=list)
    finished: list[tuple[str, int, int]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    num_open: int = 0
    num_produced: int = 0

    async def generate(self, request: EngineRequest) -> AsyncIterator[list[Frame]]:
        self.requests.append(request)
        if self.reject is not None:
            raise self.reject
        self.num_open += 1
        try:
            yield [Accepted(worker=0, replica_id="fake")]
            yield [Heartbeat(step_id=1, step_age_s=0.0, load=LOAD)]
            for event in self._events(request):
                await asyncio.sleep(self.delay_s)
                self.num_produced += len(event.token_ids)
                yield [Tokens([event], LOAD)]
            if self.error is not None:
                raise self.error
        finally:
            self.num_open -= 1

    async def finish(self, request_id: str, index: int, num_tokens: int) -> None:
        self.finished.append((request_id, index, num_tokens))

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def _events(self, request: EngineRequest) -> Iterator[TokenEvent]:
        """One by one: an endless answer is not made beforehand."""
        token_ids = list(self.answer_ids)
        if self.stop_token_id is not None and not request.params.ignore_eos:
            token_ids.append(self.stop_token_id)
        limit = request.params.max_tokens
        num_tokens = limit if self.is_endless else min(limit, len(token_ids))
        is_failing = self.error is not None or self.engine_error is not None
        if is_failing:
            num_tokens = min(num_tokens, self.fail_after)
        for start in range(0, num_tokens, self.tokens_per_frame):
            end = min(start + self.tokens_per_frame, num_tokens)
            piece = [token_ids[position % len(token_ids)] for position in range(start, end)]
            event = TokenEvent(request.request_id, 0, piece, self._logprobs(request, piece))
            if end == num_tokens and not is_failing:
                is_stop = piece[-1] in {self.stop_token_id, *request.params.stop_token_ids}
                event.finish_reason = "stop" if is_stop else "length"
            yield event
        if self.engine_error is not None:
            yield TokenEvent(request.request_id, 0, [], None, "error", self.engine_error)

    def _logprobs(self, request: EngineRequest, token_ids: list[int]) -> list[TokenLogprobs] | None:
        num_alternatives = request.params.logprobs
        if num_alternatives is None:
            return None
        return [
            (self.logprob, [(token_id, self.logprob), (5, float("-inf")), (6, -9.0)][:num_alternatives])
            for token_id in token_ids
        ]


@dataclass
class CountedMetrics:
    """`ApiMetrics` that only counts."""

    finished: list[tuple[str, int]] = field(default_factory=list)
    ttfts_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    num_tokens: int = 0

    def request_finished(self, finish_reason: str, prompt_tokens: int, e2e_s: float) -> None:
        assert e2e_s >= 0
        self.finished.append((finish_reason, prompt_tokens))

    def first_token(self, ttft_s: float) -> None:
        self.ttfts_s.append(ttft_s)

    def inter_token(self, gap_s: float) -> None:
        self.gaps_s.append(gap_s)

    def tokens_delivered(self, n: int) -> None:
        self.num_tokens += n
