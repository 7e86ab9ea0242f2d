"""Service levels: limits on the time to the first token and between tokens, and who keeps them."""

from collections.abc import Sequence
from dataclasses import dataclass

from deployments.bench.requests import Answer
from deployments.bench.stats import percentile

#: the share of inter-token times that must keep the limit, within a request and over a run
ITL_PERCENTILE = 99.0
TTFT_PERCENTILE = 50.0


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in seconds; None: no limit."""

    ttft_s: float | None = None
    itl_s: float | None = None

    @property
    def is_set(self) -> bool:
        return self.ttft_s is not None or self.itl_s is not None

    def is_good(self, answer: Answer) -> bool:
        """A good request is complete, began in time, and kept the pace in 99 of 100 of its inter-token times."""
        if not answer.is_complete:
            return False
        ttft_s, gaps_s = answer.ttft_s, answer.gaps_s
        if self.ttft_s is not None and (ttft_s is None or ttft_s > self.ttft_s):
            return False
        return self.itl_s is None or not gaps_s or percentile(gaps_s, ITL_PERCENTILE) <= self.itl_s

    def miss(self, answers: Sequence[Answer]) -> str | None:
        """Why a run misses its service level: an error, the median first token or the 99th percentile of all
        inter-token times. None if it keeps it."""
        if any(answer.error is not None for answer in answers):
            return "errors"
        if any(not answer.is_complete for answer in answers):
            return "unfinished"
        ttfts_s = [answer.ttft_s for answer in answers if answer.ttft_s is not None]
        if self.ttft_s is not None and ttfts_s and percentile(ttfts_s, TTFT_PERCENTILE) > self.ttft_s:
            return "ttft"
        gaps_s = [gap for answer in answers for gap in answer.gaps_s]
        if self.itl_s is not None and gaps_s and percentile(gaps_s, ITL_PERCENTILE) > self.itl_s:
            return "itl"
        return None
