"""What chats saw of the long prompts that came in beside them, in plain numbers."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deployments.bench.requests import Answer
from deployments.bench.stats import Percentiles, percentiles

#: the kinds of the scenario's requests
CHAT, LONG = "chat", "long"


@dataclass(frozen=True, slots=True)
class ChatsSummary:
    """Times in seconds. `itl_beside`: of the inter-token times of chats, those that touch the time in which a long
    prompt waited for its first token. `longest_silence`: of any chat, before its first token or between two; a server
    that serves one chat after the other has level inter-token times, and silences."""

    itl: Percentiles
    itl_beside: Percentiles
    longest_silence_s: float
    num_stalls: int
    tokens_per_s: float
    long_ttft: Percentiles
    num_long: int
    num_long_unanswered: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "itl_ms": self.itl.scaled(1e3),
            "itl_beside_ms": self.itl_beside.scaled(1e3),
            "longest_silence_ms": self.longest_silence_s * 1e3,
            "num_stalls": self.num_stalls,
            "tokens_per_s": self.tokens_per_s,
            "long_ttft_ms": self.long_ttft.scaled(1e3),
            "num_long": self.num_long,
            "num_long_unanswered": self.num_long_unanswered,
        }


def summarize_chats(answers: Sequence[Answer], duration_s: float, stall_threshold_s: float | None) -> ChatsSummary:
    """`stall_threshold_s`: from where on the time between two tokens of a chat is a stall; None: nowhere."""
    chats = [answer for answer in answers if answer.request.kind == CHAT and answer.error is None]
    long = [answer for answer in answers if answer.request.kind == LONG]
    waits = [(answer.intended_s, end_s) for answer in long if (end_s := _first_seen_s(answer)) is not None]
    gaps = [gap for answer in chats for gap in answer.intervals_s]
    silences_s = [end_s - answer.intended_s for answer in chats if (end_s := _first_seen_s(answer)) is not None]
    long_ttfts_s = [ttft_s for answer in long if answer.error is None and (ttft_s := answer.ttft_s) is not None]
    threshold_s = float("inf") if stall_threshold_s is None else stall_threshold_s
    return ChatsSummary(
        itl=percentiles(after - before for before, after in gaps),
        itl_beside=percentiles(_overlapping(gaps, waits)),
        longest_silence_s=max([*silences_s, *(after - before for before, after in gaps)], default=0.0),
        num_stalls=sum(after - before > threshold_s for before, after in gaps),
        tokens_per_s=sum(answer.num_output_tokens for answer in chats) / duration_s if duration_s > 0 else 0.0,
        long_ttft=percentiles(long_ttfts_s),
        num_long=len(long),
        num_long_unanswered=len(long) - len(long_ttfts_s),
    )


def _first_seen_s(answer: Answer) -> float | None:
    """When its wait for a first token was over: by the token, or by the end of the run."""
    return answer.delivery_times_s[0] if answer.delivery_times_s else answer.cut_s


def _overlapping(gaps: Sequence[tuple[float, float]], waits: Sequence[tuple[float, float]]) -> list[float]:
    """The lengths of the gaps that touch one of the waits."""
    starts_s = sorted(start_s for start_s, _ in waits)
    ends_s = sorted(end_s for _, end_s in waits)
    # Of the waits that began before a gap's end, some had ended before its start: it touches the rest.
    return [
        after - before for before, after in gaps if bisect_right(starts_s, after) > bisect_right(ends_s, before)
    ]
