"""What the request series count for one answer, and when. Knows the names of the events, not of the series."""

import time
from typing import Protocol


class ApiMetrics(Protocol):
    """Where the request series live (`monitoring.ingress_metrics`). A request is one prompt with its answers."""

    def request_finished(self, finish_reason: str, prompt_tokens: int, e2e_s: float, tenant: str = "") -> None: ...

    def first_token(self, ttft_s: float) -> None: ...

    def inter_token(self, gap_s: float) -> None: ...

    def tokens_delivered(self, n: int, tenant: str = "") -> None: ...

    def request_rejected(self, reason: str, tenant: str = "") -> None: ...


class AnswerMeter:
    """Of one request: a prompt and its answers. Times are taken where text is handed to the connection; `arrival_s` is
    when the request came, before its body was read. The first token is that of any answer. A chunk of several tokens
    is one inter-token observation of its answer: that is the gap its reader saw."""

    def __init__(self, metrics: ApiMetrics, arrival_s: float, num_prompt_tokens: int, tenant: str = "") -> None:
        self._metrics = metrics
        self._tenant = tenant
        self.arrival_s = arrival_s
        self._num_prompt_tokens = num_prompt_tokens
        self._last_s: dict[int, float] = {}
        self._is_finished = False

    def delivered(self, index: int, num_tokens: int) -> None:
        """Tokens of the answer with this index."""
        if num_tokens == 0:
            return
        now_s = time.monotonic()
        if not self._last_s:
            self._metrics.first_token(now_s - self.arrival_s)
        elif index in self._last_s:
            self._metrics.inter_token(now_s - self._last_s[index])
        self._last_s[index] = now_s
        self._metrics.tokens_delivered(num_tokens, self._tenant)

    def rejected(self, reason: str) -> None:
        """Turned away. Once tokens were delivered it is no longer that."""
        if not self._last_s:
            self._metrics.request_rejected(reason, self._tenant)

    def finished(self, finish_reason: str) -> None:
        """The first call counts: an answer that ended stays ended, whatever becomes of its connection."""
        if not self._is_finished:
            self._is_finished = True
            e2e_s = time.monotonic() - self.arrival_s
            self._metrics.request_finished(finish_reason, self._num_prompt_tokens, e2e_s, self._tenant)
