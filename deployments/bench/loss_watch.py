"""Tells when a run that is going on can no longer keep its service level: a search need not wait for its end."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from deployments.bench.requests import Answer
from deployments.bench.slo import ITL_PERCENTILE, TTFT_PERCENTILE, Slo


@dataclass(slots=True)
class _Seen:
    """What was counted of one answer: so many of its deliveries were looked at, so many of their gaps were late."""

    num_deliveries: int = 0
    num_late_gaps: int = 0


@dataclass(slots=True)
class LossWatch:
    """For one run. Looks at each delivery once, so that watching takes nothing from what is watched."""

    slo: Slo
    _seen: dict[int, _Seen] = field(default_factory=dict)

    def lost(self, answers: Sequence[Answer], now: float) -> str | None:
        """Why the level is lost, whatever comes: an error, or more late values than its percentile leaves room for.

        None while it can be kept. It says so only where `Slo.miss` at the end would, given answers of full length.
        """
        if any(answer.error is not None for answer in answers):
            return "errors"
        if self.slo.ttft_s is not None:
            late = sum(_first_token_is_late(answer, self.slo.ttft_s, now) for answer in answers)
            if late > _room(len(answers), TTFT_PERCENTILE):
                return "ttft"
        if self.slo.itl_s is not None:
            num_gaps = sum(answer.request.num_output_tokens - 1 for answer in answers)
            late = sum(self._late_gaps(place, answer, self.slo.itl_s, now) for place, answer in enumerate(answers))
            if late > _room(num_gaps, ITL_PERCENTILE):
                return "itl"
        return None

    def _late_gaps(self, place: int, answer: Answer, limit_s: float, now: float) -> int:
        seen = self._seen.setdefault(place, _Seen())
        # The engine's thread may append meanwhile: only what was there at this moment is looked at.
        num_deliveries = len(answer.delivery_times_s)
        if num_deliveries == 0:
            return 0
        new = answer.delivery_times_s[max(0, seen.num_deliveries - 1) : num_deliveries]
        seen.num_late_gaps += sum(after - before > limit_s for before, after in pairwise(new))
        seen.num_deliveries = num_deliveries
        is_waiting = answer.ended_s is None and num_deliveries < answer.request.num_output_tokens
        return seen.num_late_gaps + (is_waiting and now - new[-1] > limit_s)


def _first_token_is_late(answer: Answer, limit_s: float, now: float) -> bool:
    first_s = answer.delivery_times_s[0] if answer.delivery_times_s else now
    return first_s - answer.intended_s > limit_s


def _room(count: int, rank: float) -> int:
    """How many of `count` values may lie above a limit that their percentile keeps."""
    return count - math.ceil(count * rank / 100.0)
