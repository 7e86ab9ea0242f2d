"""Five times more requests than the server can take, and what the ones that it takes notice of it.

An engine without a model whose steps last 20 ms and hold 16 answers of 100 tokens: 8 requests a second. First as many
streams as it holds, then 40 requests a second. Prints one line of JSON: how far apart tokens came in both phases
(99th percentile), what became of the requests, and how much the memory of ingress and workers grew from second 10 on.
Exit status 1: a goal was missed.
"""

import asyncio
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from benchmarks.options import Parser, positive, run_program
from tests.chaos.client import Stream, ask, session
from tests.chaos.paced import body, paced_args, paced_environment
from tests.chaos.run import percentile
from tests.chaos.server import ChaosServer, chaos_server
from tests.tiny_models import save_tiny_model
from tests.tiny_tokenizer import save_tiny_tokenizer

STEP_S = 0.02
NUM_AT_ONCE = 16
NUM_TOKENS = 100
MAX_QUEUED_REQUESTS = 8
OVERLOAD = 5
CAPACITY_PER_S = NUM_AT_ONCE / (NUM_TOKENS * STEP_S)
#: from when on the memory must not grow
SETTLED_S = 10.0
#: goals: how much further apart tokens may come, and what the memory may grow by
MOST_ITL_RATIO = 1.5
MOST_RSS_GROWTH = 0.05
#: the first steps after a change of load are no steady state
_WARM_UP_TOKENS = 10


@dataclass(frozen=True, slots=True)
class Report:
    """`faults`: requests that neither ended well nor were refused with 429 and a `Retry-After` of at least 1."""

    itl_p99_alone_ms: float
    itl_p99_overloaded_ms: float
    asked: int
    answered: int
    refused: int
    faults: list[str]
    rss_growth: float

    def missed(self) -> list[str]:
        missed = list(self.faults[:5])
        if self.itl_p99_overloaded_ms > MOST_ITL_RATIO * self.itl_p99_alone_ms:
            missed.append(f"inter-token p99 {self.itl_p99_overloaded_ms:.0f} ms, alone {self.itl_p99_alone_ms:.0f} ms")
        if self.refused == 0:
            missed.append("nobody was refused")
        if self.rss_growth >= MOST_RSS_GROWTH:
            missed.append(f"memory grew by {self.rss_growth:.1%}")
        return missed


def server_args(folder: Path) -> dict[str, object]:
    return paced_args(folder, 1, max_num_seqs=NUM_AT_ONCE, max_queued_requests=MAX_QUEUED_REQUESTS)


def overload(server: ChaosServer, duration_s: float) -> Report:
    pids = [*server.worker_pids(), *server.ingress_pids()]
    alone = asyncio.run(_as_many_as_fit(server.url))
    streams, rss_bytes = asyncio.run(_too_many(server.url, duration_s, pids))
    settled = rss_bytes[min(int(SETTLED_S), len(rss_bytes) // 2) :]
    answered = [stream for stream in streams if stream.is_done]
    refused = [stream for stream in streams if _is_refused(stream)]
    faults = [stream.end for stream in streams if not stream.is_done and not _is_refused(stream)]
    return Report(
        itl_p99_alone_ms=1e3 * _itl_p99_s(alone),
        itl_p99_overloaded_ms=1e3 * _itl_p99_s(answered),
        asked=len(streams),
        answered=len(answered),
        refused=len(refused),
        faults=faults,
        rss_growth=max(settled) / settled[0] - 1.0,
    )


async def _as_many_as_fit(url: str) -> list[Stream]:
    async with session(url) as http:
        asking = []
        for number in range(NUM_AT_ONCE):
            asking.append(asyncio.create_task(ask(http, _body(number))))
            await asyncio.sleep(2 * STEP_S)  # all at once would overflow the queue before a step takes them in
        streams = await asyncio.gather(*asking)
    assert all(stream.is_done for stream in streams), [stream.end for stream in streams]
    return streams


async def _too_many(url: str, duration_s: float, pids: list[int]) -> tuple[list[Stream], list[int]]:
    """All streams, and the memory of those processes together in each second."""
    rss_bytes: list[int] = []
    asking: list[asyncio.Task[Stream]] = []
    began_s = time.monotonic()
    async with session(url) as http:
        while (elapsed_s := time.monotonic() - began_s) < duration_s:
            if elapsed_s >= len(rss_bytes):
                rss_bytes.append(sum(psutil.Process(pid).memory_info().rss for pid in pids))
            while len(asking) < elapsed_s * OVERLOAD * CAPACITY_PER_S:
                asking.append(asyncio.create_task(ask(http, _body(len(asking)))))
            await asyncio.sleep(0.005)
        streams = await asyncio.gather(*asking)
    return streams, rss_bytes


def _body(number: int) -> dict[str, object]:
    return body([5 + number % 200, 5 + number // 200, *([9] * 30)], NUM_TOKENS)


def _is_refused(stream: Stream) -> bool:
    return stream.status == 429 and stream.retry_after is not None and int(stream.retry_after) >= 1


def _itl_p99_s(streams: list[Stream]) -> float:
    return percentile(sorted(gap_s for stream in streams for gap_s in stream.gaps_s[_WARM_UP_TOKENS:]), 0.99)


def main() -> int:
    parser = Parser("benchmarks.serving_overload", __doc__)
    parser.add_argument("--seconds", type=positive, default=60.0, help="of the overload (default: %(default)g)")
    args = parser.parse_args()
    folder = save_tiny_tokenizer(save_tiny_model(Path(tempfile.mkdtemp()) / "tiny", "llama"))
    with chaos_server(server_args(folder), paced_environment(step_ms=1e3 * STEP_S)) as server:
        report = overload(server, args.seconds)
    print(json.dumps({**asdict(report), "faults": len(report.faults)}))
    for line in report.missed():
        print(f"missed: {line}", file=sys.stderr)
    return 1 if report.missed() else 0


if __name__ == "__main__":
    run_program(main)
