"""A worker client without workers: answers every request with the ids it was given, frame by frame, and keeps book
of what it was told."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

from deployments.frames import Accepted, Frame, Heartbeat, Tokens
from worker.types import EngineLoad, EngineRequest, PromptTokenLogprobs, TokenEvent, TokenLogprobs

LOAD = EngineLoad(
    num_waiting=0, num_running=1, num_swapped=0, num_queued_tokens=0, num_free_blocks=9, num_used_blocks=1
)


@dataclass
class FakeWorker:
    """`answer_ids` are produced `tokens_per_frame` a frame, then `stop_token_id` unless EOS is ignored; again
    and again if `is_endless`. Sample i answers with `sample_ids[i]` where there are some, one token of each in turn,
    with log-probabilities `sample_logprobs[i]`, again and again. `error` is raised, or `engine_error` reported, after
    `fail_after` tokens."""

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
    sample_ids: list[list[int]] = field(default_factory=list)
    sample_logprobs: list[list[float]] = field(default_factory=list)
    num_cached_tokens: int | None = None
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
        """One by one: an endless answer is not made beforehand. Of several samples each has its turn."""
        samples = [self._sample_events(request, index) for index in range(request.params.n)]
        is_first = True
        while samples:
            for sample in list(samples):
                event = next(sample, None)
                if event is None:
                    samples.remove(sample)
                    continue
                if is_first:
                    event.num_cached_tokens, is_first = self.num_cached_tokens, False
                    event.prompt_logprobs = _prompt_logprobs(request, self.logprob)
                yield event

    def _sample_events(self, request: EngineRequest, index: int) -> Iterator[TokenEvent]:
        token_ids = list(self.sample_ids[index] if self.sample_ids else self.answer_ids)
        if self.stop_token_id is not None and not request.params.ignore_eos:
            token_ids.append(self.stop_token_id)
        limit = request.params.max_tokens
        num_tokens = limit if self.is_endless else min(limit, len(token_ids))
        is_failing = self.error is not None or self.engine_error is not None
        if is_failing:
            num_tokens = min(num_tokens, self.fail_after)
        if num_tokens == 0 and not is_failing:
            yield TokenEvent(request.request_id, index, [], None, "length")
        for start in range(0, num_tokens, self.tokens_per_frame):
            end = min(start + self.tokens_per_frame, num_tokens)
            piece = [token_ids[position % len(token_ids)] for position in range(start, end)]
            own = self.sample_logprobs[index] if self.sample_logprobs else [self.logprob]
            logprobs = [own[position % len(own)] for position in range(start, end)]
            event = TokenEvent(request.request_id, index, piece, _alternatives(request, piece, logprobs))
            if end == num_tokens and not is_failing:
                is_stop = piece[-1] in {self.stop_token_id, *request.params.stop_token_ids}
                event.finish_reason = "stop" if is_stop else "length"
            yield event
        if self.engine_error is not None:
            yield TokenEvent(request.request_id, index, [], None, "error", self.engine_error)


def _prompt_logprobs(request: EngineRequest, logprob: float) -> list[PromptTokenLogprobs] | None:
    """The token at place i has i times the log-probability, and the rank i."""
    if request.params.prompt_logprobs is None:
        return None
    alternatives = [(5, -0.125), (6, float("-inf")), (7, -9.0)][: request.params.prompt_logprobs]
    return [(place * logprob, place, alternatives) for place in range(1, len(request.prompt_token_ids))]


def _alternatives(
    request: EngineRequest, token_ids: list[int], logprobs: list[float]
) -> list[TokenLogprobs] | None:
    num_alternatives = request.params.logprobs
    if num_alternatives is None:
        return None
    return [
        (logprob, [(token_id, logprob), (5, float("-inf")), (6, -9.0)][:num_alternatives])
        for token_id, logprob in zip(token_ids, logprobs, strict=True)
    ]


@dataclass
class CountedMetrics:
    """`ApiMetrics` that only counts."""

    finished: list[tuple[str, int]] = field(default_factory=list)
    ttfts_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    rejections: list[str] = field(default_factory=list)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    times_per_token_s: list[float | None] = field(default_factory=list)
    #: of whom anything was counted
    tenants: set[str] = field(default_factory=set)

    def request_rejected(self, reason: str, tenant: str = "") -> None:
        self.tenants.add(tenant)
        self.rejections.append(reason)

    def request_finished(self, finish_reason: str, prompt_tokens: int, e2e_s: float, tenant: str = "") -> None:
        self.tenants.add(tenant)
        assert e2e_s >= 0
        self.finished.append((finish_reason, prompt_tokens))

    def request_sizes(self, prompt_tokens: int, generation_tokens: int, time_per_token_s: float | None) -> None:
        self.sizes.append((prompt_tokens, generation_tokens))
        self.times_per_token_s.append(time_per_token_s)

    def first_token(self, ttft_s: float) -> None:
        self.ttfts_s.append(ttft_s)

    def inter_token(self, gap_s: float) -> None:
        self.gaps_s.append(gap_s)

    def tokens_delivered(self, n: int, tenant: str = "") -> None:
        self.tenants.add(tenant)
        self.num_tokens += n
