"""What the request series count for one answer, and when. Knows the names of the events, not of the series."""

import time
from dataclasses import dataclass
from typing import Protocol


class ApiMetrics(Protocol):
    """Where the request series live (`monitoring.ingress_metrics`). A request is one prompt with its answers."""

    def request_finished(self, finish_reason: str, prompt_tokens: int, e2e_s: float, tenant: str = "") -> None: ...

    def request_sizes(
        self, prompt_tokens: int, generation_tokens: int, time_per_token_s: float | None
    ) -> None: ...

    def first_token(self, ttft_s: float) -> None: ...

    def inter_token(self, gap_s: float) -> None: ...

    def tokens_delivered(self, n: int, tenant: str = "") -> None: ...

    def request_rejected(self, reason: str, tenant: str = "") -> None: ...


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """What is told of a request when it has ended. `ttft_s` None: no token left for the client."""

    finish_reason: str
    tenant: str
    num_prompt_tokens: int
    num_generated_tokens: int
    e2e_s: float
    ttft_s: float | None

    @property
    def time_per_token_s(self) -> float | None:
        """Of each token after the first; None where the answer is not whole or has one token alone."""
        if self.finish_reason not in ("stop", "length") or self.ttft_s is None or self.num_generated_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.num_generated_tokens - 1)


class AnswerMeter:
    """Of one request: a prompt and its answers. Times are taken where text is handed to the connection; `arrival_s` is
    when the request came, before its body was read. The first token is that of any answer. A chunk of several tokens
    is one inter-token observation of its answer: that is the gap its reader saw."""

    def __init__(self, metrics: ApiMetrics, arrival_s: float, num_prompt_tokens: int, tenant: str = "") -> None:
        self._metrics = metrics
        self._tenant = tenant
        self.arrival_s = arrival_s
        self._num_prompt_tokens = num_prompt_tokens
        self._first_s: float | None = None
        self._last_s: dict[int, float] = {}
        self._is_finished = False

    def delivered(self, index: int, num_tokens: int) -> None:
        """Tokens of the answer with this index."""
        if num_tokens == 0:
            return
        now_s = time.monotonic()
        if self._first_s is None:
            self._first_s = now_s
            self._metrics.first_token(now_s - self.arrival_s)
        elif index in self._last_s:
            self._metrics.inter_token(now_s - self._last_s[index])
        self._last_s[index] = now_s
        self._metrics.tokens_delivered(num_tokens, self._tenant)

    def rejected(self, reason: str) -> None:
        """Turned away. Once tokens were delivered it is no longer that."""
        if not self._last_s:
            self._metrics.request_rejected(reason, self._tenant)

    def finished(self, finish_reason: str, num_generated_tokens: int) -> EndedRequest | None:
        """The first call counts, and returns what there is to tell: an answer that ended stays ended, whatever becomes
        of its connection. `num_generated_tokens` are those of all its answers, handed out or about to be."""
        if self._is_finished:
            return None
        self._is_finished = True
        now_s = time.monotonic()
        ended = EndedRequest(
            finish_reason=finish_reason,
            tenant=self._tenant,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generated_tokens=num_generated_tokens,
            e2e_s=now_s - self.arrival_s,
            ttft_s=None if self._first_s is None else self._first_s - self.arrival_s,
        )
        self._metrics.request_finished(finish_reason, self._num_prompt_tokens, ended.e2e_s, self._tenant)
        self._metrics.request_sizes(self._num_prompt_tokens, num_generated_tokens, ended.time_per_token_s)
        return ended
