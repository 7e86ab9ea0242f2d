"""One chaos run: streams in flight all the time, workers disturbed meanwhile, and what came of it.

Owns the traffic and the verdict.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from tests.chaos.client import Stream, ask, session
from tests.chaos.disturber import Disturbances, Disturber
from tests.chaos.mix import Margins, MixRequest, difference, is_whole, tokens_of
from tests.chaos.server import ChaosServer
from tests.oracle.compare import MAX_NEAR_TIE_SHARE
from tests.server_process import wait_until

CLIENT_GAP_GOAL_S = 3.0
IDLE_TIMEOUT_S = 20.0


@dataclass
class Asked:
    """One request as it went: which of the mix, and the stream that answered it until `end_s`."""

    number: int
    stream: Stream
    end_s: float = 0.0


@dataclass
class Verdict:
    """`lost`: without a whole answer. `client_gap_p99_s` is of the streams that were on a killed worker, each with its
    largest gap."""

    requests: int = 0
    completed: int = 0
    changed: int = 0
    near_ties: int = 0
    lost: int = 0
    kills: int = 0
    client_gap_p99_s: float = 0.0
    leaked_blocks: int = 0

    def failures(self, num_kills: int, most_gap_s: float = CLIENT_GAP_GOAL_S) -> list[str]:
        must_be_zero = {"changed": self.changed, "lost": self.lost, "leaked_blocks": self.leaked_blocks}
        failures = [f"{name}: {value}" for name, value in must_be_zero.items() if value]
        if self.near_ties > max(1, int(MAX_NEAR_TIE_SHARE * self.requests)):
            failures.append(f"near_ties: {self.near_ties} of {self.requests}")
        if self.kills < num_kills:
            failures.append(f"kills: {self.kills} of {num_kills}")
        if self.client_gap_p99_s >= most_gap_s:
            failures.append(f"client_gap_p99_s: {self.client_gap_p99_s}")
        return failures

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


@dataclass
class ChaosRun:
    """`expected`: the tokens of each choice of each request, undisturbed."""

    server: ChaosServer
    requests: list[MixRequest]
    expected: list[list[list[str]]]
    model: str
    num_in_flight: int = 12
    margins: Margins | None = None
    asked: list[Asked] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def run(self, disturber: Disturber, wanted: Disturbances, min_requests: int) -> Verdict:
        """Goes on until everything has happened and `min_requests` have been asked."""
        asyncio.run(self._traffic(disturber, wanted, min_requests))
        verdict = self._judge(disturber)
        try:
            wait_until(self.server.is_idle, IDLE_TIMEOUT_S)
        except AssertionError:
            held = self.server.scrape().held
            self.notes.append(f"not idle: gauges {held}, Serve's ongoing requests {self.server.num_ongoing()}")
            verdict.leaked_blocks = max(1, int(sum(held[-1:])))
        return verdict

    async def _traffic(self, disturber: Disturber, wanted: Disturbances, min_requests: int) -> None:
        disturbing = asyncio.create_task(disturber.disturb(wanted))
        async with session(self.server.url) as http:

            async def client() -> None:
                while not disturbing.done() or len(self.asked) < min_requests:
                    asked = Asked(len(self.asked) % len(self.requests), Stream())
                    self.asked.append(asked)
                    await ask(http, self.requests[asked.number].body(self.model), asked.stream)
                    asked.end_s = time.monotonic()
                    if not asked.stream.is_done:
                        await asyncio.sleep(0.2)  # a server that refuses everything must not be asked in a hot loop

            await asyncio.gather(*(client() for _ in range(self.num_in_flight)))
        await disturbing

    def _judge(self, disturber: Disturber) -> Verdict:
        verdict = Verdict(requests=len(self.asked), kills=len(disturber.pids("kill")))
        for asked in self.asked:
            request = self.requests[asked.number]
            if not is_whole(request, asked.stream):
                verdict.lost += 1
                self.notes.append(f"lost: request {asked.number} {asked.stream.end} {asked.stream.usage}")
                continue
            verdict.completed += 1
            kind = difference(request, self.expected[asked.number], tokens_of(asked.stream), self.margins)
            verdict.changed += kind == "changed"
            verdict.near_ties += kind == "near_tie"
            if kind is not None:
                self.notes.append(f"{kind}: request {asked.number} {tokens_of(asked.stream)}")
        gaps_s = sorted(asked.stream.largest_gap_s for asked in self._on_killed_workers(disturber))
        self.notes.append(f"{len(gaps_s)} streams were on a killed worker")
        verdict.client_gap_p99_s = round(percentile(gaps_s, 0.99), 3)
        return verdict

    def _on_killed_workers(self, disturber: Disturber) -> list[Asked]:
        """Those that were open when it was killed. A stream that was on a stopped worker as well is left out: what
        it waited there is the stall time that was chosen, not what a death costs."""
        found = {"kill": set[int](), "stop": set[int]()}
        for event in disturber.events:
            if event.kind in found:
                ids = self.server.request_ids(event.pid)
                found[event.kind] |= {
                    place
                    for place, asked in enumerate(self.asked)
                    if asked.stream.times_s
                    and asked.stream.response_id in ids
                    and asked.stream.sent_s <= event.time_s <= asked.end_s
                }
        return [self.asked[place] for place in sorted(found["kill"] - found["stop"])]


def percentile(ordered: Sequence[float], share: float) -> float:
    """Of sorted values, the nearest rank; 0.0 of none."""
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0
