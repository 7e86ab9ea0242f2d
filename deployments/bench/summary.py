"""What one run comes to, in plain numbers: latencies, throughput, goodput, stalls, errors, the client's overhead."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from deployments.bench.arrivals import mean_rate
from deployments.bench.chats_summary import ChatsSummary, summarize_chats
from deployments.bench.driver import Run
from deployments.bench.requests import Answer
from deployments.bench.slo import Slo
from deployments.bench.stats import Percentiles, most_common, percentiles

#: without an inter-token limit, a time this many times the run's median is a stall
STALL_FACTOR = 5.0
_SHOWN_ERRORS = 5


@dataclass(slots=True)
class Latencies:
    """Of complete requests, and as far as they got of those that a run of a set length cut, in seconds."""

    ttft: Percentiles
    itl: Percentiles
    tpot: Percentiles
    e2e: Percentiles

    def to_dict(self) -> dict[str, Any]:
        return {f"{name}_ms": getattr(self, name).scaled(1e3) for name in ("ttft", "itl", "tpot", "e2e")}


@dataclass(slots=True)
class Summary:
    """Rates are per second of the run, from the first intended start to the last end. Goodput counts the requests
    that keep the service level, of all that were sent. `chats` belongs to the scenario of that name."""

    target: str
    offered_rate: float
    duration_s: float
    num_requests: int
    num_complete: int
    num_failed: int
    num_unfinished: int
    num_short: int
    num_longer: int
    input_tokens_per_s: float
    output_tokens_per_s: float
    requests_per_s: float
    num_good: int | None
    goodput_requests_per_s: float | None
    latencies: Latencies
    by_kind: dict[str, Latencies]
    stall_threshold_s: float | None
    num_stalls: int
    send_lateness: Percentiles
    loop_lag: Percentiles
    abandoned: str | None
    errors: dict[str, int] = field(default_factory=dict)
    chats: ChatsSummary | None = None
    #: of a complete request on average, as planned
    prompt_tokens_asked: float | None = None

    @property
    def is_unanswered(self) -> bool:
        """Requests failed, and none was answered, not even as far as the end of a run that was cut."""
        return self.num_failed > 0 and self.latencies.ttft.count == 0

    @property
    def prompt_tokens(self) -> float | None:
        """Of a complete request on average, as the target counts them."""
        return self.input_tokens_per_s / self.requests_per_s if self.requests_per_s else None

    def to_dict(self) -> dict[str, Any]:
        threshold_ms = None if self.stall_threshold_s is None else self.stall_threshold_s * 1e3
        plain = (
            "target", "offered_rate", "duration_s", "num_requests", "num_complete", "num_failed", "num_unfinished",
            "num_short", "num_longer", "errors", "abandoned", "requests_per_s", "input_tokens_per_s",
            "output_tokens_per_s", "prompt_tokens", "prompt_tokens_asked", "num_good", "goodput_requests_per_s",
        )  # fmt: skip
        return {
            **{name: getattr(self, name) for name in plain},
            **self.latencies.to_dict(),
            "by_kind": {kind: latencies.to_dict() for kind, latencies in self.by_kind.items()},
            "stalls": {"threshold_ms": threshold_ms, "count": self.num_stalls},
            "chats": None if self.chats is None else self.chats.to_dict(),
            "client": {
                "send_lateness_ms": self.send_lateness.scaled(1e3),
                "loop_lag_ms": self.loop_lag.scaled(1e3),
            },
        }


def summarize(run: Run, slo: Slo) -> Summary:
    answers = run.answers
    complete = [answer for answer in answers if answer.is_complete]
    seen = [answer for answer in answers if answer.is_complete or answer.cut_s is not None]
    duration_s = run.duration_s
    threshold_s = stall_threshold_s(answers, slo)
    gaps_s = [gap for answer in answers for gap in answer.gaps_s]
    kinds = sorted({answer.request.kind for answer in answers})
    num_good = sum(slo.is_good(answer) for answer in answers) if slo.is_set else None
    failures = [answer.error for answer in answers if answer.error is not None]
    return Summary(
        target=run.target,
        offered_rate=mean_rate(sorted(answer.request.arrival_s for answer in answers)),
        duration_s=duration_s,
        num_requests=len(answers),
        num_complete=len(complete),
        num_failed=len(failures),
        num_unfinished=len(answers) - len(complete) - len(failures),
        num_short=sum(answer.num_output_tokens < answer.request.num_output_tokens for answer in complete),
        num_longer=sum(answer.num_output_tokens > answer.request.num_output_tokens for answer in complete),
        input_tokens_per_s=_per_second(sum(answer.num_input_tokens for answer in complete), duration_s),
        output_tokens_per_s=_per_second(sum(answer.num_output_tokens for answer in seen), duration_s),
        requests_per_s=_per_second(len(complete), duration_s),
        num_good=num_good,
        goodput_requests_per_s=None if num_good is None else _per_second(num_good, duration_s),
        latencies=_latencies(seen),
        by_kind={kind: _latencies([a for a in seen if a.request.kind == kind]) for kind in kinds}
        if len(kinds) > 1
        else {},
        stall_threshold_s=threshold_s,
        num_stalls=0 if threshold_s is None else sum(gap > threshold_s for gap in gaps_s),
        send_lateness=percentiles(late for a in answers if (late := a.send_lateness_s) is not None),
        loop_lag=percentiles(run.loop_lags_s),
        abandoned=run.abandoned,
        errors=most_common(failures, _SHOWN_ERRORS),
        chats=summarize_chats(answers, duration_s, threshold_s) if run.is_of_chats else None,
        prompt_tokens_asked=statistics.fmean(answer.request.num_input_tokens for answer in complete)
        if complete
        else None,
    )


def stall_threshold_s(answers: Sequence[Answer], slo: Slo) -> float | None:
    """The time between two tokens from which on it is a stall: the limit, or a multiple of the median."""
    if slo.itl_s is not None:
        return slo.itl_s
    gaps_s = [gap for answer in answers for gap in answer.gaps_s]
    return STALL_FACTOR * statistics.median(gaps_s) if gaps_s else None


def _latencies(answers: Sequence[Answer]) -> Latencies:
    return Latencies(
        ttft=percentiles(ttft for answer in answers if (ttft := answer.ttft_s) is not None),
        itl=percentiles(gap for answer in answers for gap in answer.gaps_s),
        tpot=percentiles(tpot for answer in answers if (tpot := _time_per_output_token_s(answer)) is not None),
        e2e=percentiles(e2e for answer in answers if (e2e := answer.e2e_s) is not None),
    )


def _time_per_output_token_s(answer: Answer) -> float | None:
    if answer.num_output_tokens < 2 or not answer.is_complete:
        return None
    times = answer.delivery_times_s
    return (times[-1] - times[0]) / (answer.num_output_tokens - 1)


def _per_second(count: float, duration_s: float) -> float:
    return count / duration_s if duration_s > 0 else 0.0
