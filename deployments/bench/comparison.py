"""Several targets under the same load: medians over the rounds, and their ratios to the first target's.

Owns what makes a comparison void: answers of another length than all were asked for.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from deployments.bench.chats_summary import CHAT, ChatsSummary
from deployments.bench.summary import Summary
from deployments.bench.target import TargetError

Quantities = dict[str, Callable[[Summary], float | None]]

#: what is compared: a name, and where it stands in a summary
COMPARED: Quantities = {
    "output_tokens_per_s": lambda summary: summary.output_tokens_per_s,
    "goodput_requests_per_s": lambda summary: summary.goodput_requests_per_s,
    "ttft_p50_s": lambda summary: summary.latencies.ttft.p50,
    "ttft_p99_s": lambda summary: summary.latencies.ttft.p99,
    "itl_p50_s": lambda summary: summary.latencies.itl.p50,
    "itl_p99_s": lambda summary: summary.latencies.itl.p99,
    "itl_max_s": lambda summary: summary.latencies.itl.max,
    "e2e_p50_s": lambda summary: summary.latencies.e2e.p50,
    "e2e_p99_s": lambda summary: summary.latencies.e2e.p99,
    "prompt_tokens": lambda summary: summary.prompt_tokens,
}


def _of_chats(value_of: Callable[[ChatsSummary], float | None]) -> Callable[[Summary], float | None]:
    return lambda summary: None if summary.chats is None else value_of(summary.chats)


COMPARED_CHATS: Quantities = {
    "chats_itl_p50_s": _of_chats(lambda chats: chats.itl.p50),
    "chats_itl_p99_s": _of_chats(lambda chats: chats.itl.p99),
    "chats_itl_max_s": _of_chats(lambda chats: chats.itl.max),
    "chats_itl_beside_long_p50_s": _of_chats(lambda chats: chats.itl_beside.p50),
    "chats_itl_beside_long_p99_s": _of_chats(lambda chats: chats.itl_beside.p99),
    "chats_stalls": _of_chats(lambda chats: float(chats.num_stalls)),
    "chats_longest_silence_s": _of_chats(lambda chats: chats.longest_silence_s),
    "chats_tokens_per_s": _of_chats(lambda chats: chats.tokens_per_s),
    "chats_ttft_p50_s": lambda summary: summary.by_kind[CHAT].ttft.p50,
    "long_ttft_p50_s": _of_chats(lambda chats: chats.long_ttft.p50),
    "long_ttft_max_s": _of_chats(lambda chats: chats.long_ttft.max),
    "long_unanswered": _of_chats(lambda chats: float(chats.num_long_unanswered)),
}


class UnequalAnswersError(TargetError):
    """A target's answers have another length than was asked for, so that it did other work than the rest."""

    def __init__(self, summary: Summary) -> None:
        super().__init__(
            f"{summary.target}: {summary.num_short} of {summary.num_complete} answers are shorter than asked for, "
            f"{summary.num_longer} longer; a server that does not know ignore_eos may know something else (--body)",
            summary.target,
        )


def check_lengths(summary: Summary) -> None:
    """Raises UnequalAnswersError unless every complete answer has the length that was asked for."""
    if summary.num_short or summary.num_longer:
        raise UnequalAnswersError(summary)


@dataclass(frozen=True, slots=True)
class Compared:
    """One target. `ratios` are medians of the ratios of each round, so that a round on a slow machine does not tilt
    them; None where either side has no value."""

    target: str
    num_rounds: int
    num_failed: int
    medians: dict[str, float | None]
    ratios: dict[str, float | None]

    def to_dict(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "rounds": self.num_rounds,
            "num_failed": self.num_failed,
            "medians": self.medians,
            "ratios_to_first": self.ratios,
        }


def compare(rounds: Sequence[Sequence[Summary]]) -> list[Compared]:
    """`rounds[i]` holds the summaries of target i, round by round."""
    first = rounds[0]
    quantities = COMPARED if first[0].chats is None else COMPARED_CHATS
    compared = []
    for summaries in rounds:
        medians: dict[str, float | None] = {}
        ratios: dict[str, float | None] = {}
        for name, value_of in quantities.items():
            values = [value_of(summary) for summary in summaries]
            medians[name] = _median(values)
            pairs = zip(values, (value_of(summary) for summary in first), strict=True)
            ratios[name] = _median([None if own is None or not base else own / base for own, base in pairs])
        num_failed = sum(summary.num_failed for summary in summaries)
        compared.append(Compared(summaries[0].target, len(summaries), num_failed, medians, ratios))
    return compared


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known and len(known) == len(values) else None
