"""The rows of the comparison through HTTP: what is sent, which figures are shown of it, and what we claim of them.

Knows no server and no process.
"""

import math
from dataclasses import dataclass

from benchmarks.servers.commands import OURS_DEFAULT
from deployments.bench.chats import ChatsWorkload
from deployments.bench.mixes import LengthRange, MixPart
from deployments.bench.workloads import SyntheticWorkload, Workload

SEED = 0
VLLM = "vllm"


@dataclass(frozen=True, slots=True)
class Figure:
    """A quantity of `deployments.bench.comparison`, as it is shown. `less_is_better` of times and stalls."""

    quantity: str
    title: str
    less_is_better: bool = True

    @property
    def is_time(self) -> bool:
        return self.quantity.endswith("_s") and not self.quantity.endswith("per_s")


@dataclass(frozen=True, slots=True)
class Row:
    """One load for all servers. `rate` in requests a second; None: the workload's own."""

    name: str
    workload: Workload
    rate: float | None
    num_requests: int | None
    figures: tuple[Figure, ...]


@dataclass(frozen=True, slots=True)
class Goal:
    """`quantity` of ours over that of `other` is to be at most (or, `at_least`, at least) `ratio`; `strictly`: not
    just that."""

    row: str
    quantity: str
    other: str
    ratio: float
    at_least: bool = False
    strictly: bool = False

    def holds(self, ratio: float) -> bool:
        if self.strictly:
            return ratio > self.ratio if self.at_least else ratio < self.ratio
        return ratio >= self.ratio if self.at_least else ratio <= self.ratio

    def describe(self) -> str:
        bound = {(False, False): "at most", (False, True): "below", (True, False): "at least", (True, True): "above"}
        return f"{bound[self.at_least, self.strictly]} {self.ratio:g} x {self.other}'s"


def one_stream(num_requests: int, interval_s: float) -> Row:
    """One request after the other: each has long ended when the next one leaves."""
    parts = [MixPart("", 1.0, LengthRange(128, 128), LengthRange(8, 8))]
    workload = SyntheticWorkload(parts, SEED, num_requests, math.inf)
    figures = (Figure("ttft_p50_s", "1 stream: first token, median"),)
    return Row("one_stream", workload, 1.0 / interval_s, num_requests, figures)


def streams(num_streams: int) -> Row:
    """So many requests at once."""
    parts = [MixPart("", 1.0, LengthRange(128, 128), LengthRange(128, 128))]
    workload = SyntheticWorkload(parts, SEED, num_streams)
    title = f"{num_streams} streams: output tokens a second"
    return Row("streams", workload, math.inf, num_streams, (Figure("output_tokens_per_s", title, False),))


def chats(duration_s: float) -> Row:
    workload = ChatsWorkload(duration_s)
    beside = f"beside a prompt of {workload.long_input_tokens:,}"
    what = f"{workload.num_chats} chats"
    figures = (
        Figure("chats_itl_p50_s", f"{what}: inter-token, median"),
        Figure("chats_itl_p99_s", f"{what}: inter-token, p99"),
        Figure("chats_itl_beside_long_p99_s", f"{what}: inter-token, p99 {beside}"),
        Figure("chats_itl_max_s", f"{what}: inter-token, worst"),
        Figure("chats_longest_silence_s", f"{what}: longest silence of one"),
        Figure("chats_tokens_per_s", f"{what}: tokens a second of all", False),
        Figure("long_ttft_p50_s", "the long prompt: first token, median"),
    )
    return Row("chats", workload, None, None, figures)


def all_rows(duration_s: float) -> dict[str, Row]:
    rows = (chats(duration_s), one_stream(num_requests=8, interval_s=0.75), streams(32))
    return {row.name: row for row in rows}


GOALS = (
    Goal("chats", "chats_itl_p99_s", OURS_DEFAULT, 0.5),
    Goal("chats", "chats_itl_p99_s", VLLM, 1.0, strictly=True),
    Goal("one_stream", "ttft_p50_s", VLLM, 1.0),
    Goal("streams", "output_tokens_per_s", VLLM, 1.3, at_least=True),
)
