"""What Serve costs: the same requests through the engine's loop in this process and over HTTP, in one run.

`paced_N`: an engine without a model whose steps last 20 ms, N streams in flight. `ttft_added_ms` is the mean time to
the first token over that of the loop, `ttft_added_p50_ms` the same of the medians; `lag_*` is from when the engine let
go of a token until the client had it, less the loop's own median. `model_32`: output tokens a second of a real model
on one thread. Rounds alternate between both.
The goals stand in `GOALS`; exit status 1 tells that one was missed.
"""

import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.options import NamesOnce, Parser, run_program
from benchmarks.serving_cost import ProcessTimes
from benchmarks.serving_departures import Departures
from benchmarks.serving_runs import MODEL_NAME, Answer, LoopSide, ServedSide, Workload
from deployments.app import ENGINE_BUILDER, build_with_engine
from deployments.cli.local_ray import RunningApp
from deployments.config import AppArgs
from deployments.engine_seam import import_builder
from tests.paced_engine import LOG_VARIABLE
from tests.server_process import free_port
from tests.tiny_models import save_tiny_model
from tests.tiny_tokenizer import save_tiny_tokenizer
from worker.weights import resolve_model

PACED_ENGINE = "tests.paced_engine:build"
#: TTFT added at 1 stream, lag at 32, share of the loop's throughput
GOALS = {"ttft_added_ms": 5.0, "lag_p50_ms": 10.0, "throughput_share": 0.9}
PACED_WORKLOADS = (Workload(1, 16, 64, 12), Workload(8, 32, 64, 48), Workload(32, 96, 64, 64))
#: connections are made and code is loaded with the first requests of a server, which are not measured
WARM_UP = Workload(8, 16, 64, 12)
MODEL_WORKLOAD = Workload(32, 32, 128, 64)
MODEL_ROW = f"model_{MODEL_WORKLOAD.num_streams}"
ROWS = (*(f"paced_{workload.num_streams}" for workload in PACED_WORKLOADS), MODEL_ROW)
NUM_ROUNDS = 2
#: of docs/serving-costs.md, with HAProxy in front; the last one only so that the end does not take half a minute
THROUGHPUT_MODE = {
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
}


@dataclass(slots=True)
class Side:
    answers: list[Answer] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)

    def add(self, answers: list[Answer]) -> None:
        self.answers += answers
        began_s = min(answer.sent_s for answer in answers)
        ended_s = max(answer.times_s[-1] for answer in answers)
        self.tokens_per_s.append(sum(answer.num_tokens for answer in answers) / (ended_s - began_s))

    @property
    def ttft_ms(self) -> float:
        return 1e3 * statistics.fmean(answer.ttft_s for answer in self.answers)

    @property
    def ttft_p50_ms(self) -> float:
        return 1e3 * statistics.median(answer.ttft_s for answer in self.answers)


def paced_rows(log: Path, workloads: list[Workload]) -> list[dict[str, Any]]:
    folder = save_tiny_tokenizer(save_tiny_model(Path(tempfile.mkdtemp()) / "tiny", "llama"))
    args = AppArgs(model=str(folder), served_model_name=MODEL_NAME, metrics_port=0)
    rows = []
    loop = LoopSide(import_builder(PACED_ENGINE), args.to_engine_config())
    with served(args, PACED_ENGINE) as url:
        for side in (loop, ServedSide(url)):
            side.run(WARM_UP, NUM_ROUNDS)
        for workload in workloads:
            sides = {"loop": Side(), "served": Side()}
            times = ProcessTimes()
            for round_ in range(NUM_ROUNDS):
                sides["loop"].add(loop.run(workload, round_))
                times.begin()
                sides["served"].add(ServedSide(url).run(workload, round_))
                times.end()
            rows.append(
                paced_row(workload, sides, Departures.of(log, sides["loop"].answers + sides["served"].answers), times)
            )
    loop.close()
    return rows


def paced_row(
    workload: Workload, sides: dict[str, Side], departures: Departures, times: ProcessTimes
) -> dict[str, Any]:
    served_answers = sides["served"].answers
    own_lag_s = statistics.median(departures.lags_s(sides["loop"].answers))
    lags_ms = sorted(1e3 * (lag_s - own_lag_s) for lag_s in departures.lags_s(served_answers))
    num_tokens = sum(answer.num_tokens for answer in served_answers)
    return {
        "row": f"paced_{workload.num_streams}",
        "ttft_added_ms": sides["served"].ttft_ms - sides["loop"].ttft_ms,
        "ttft_added_p50_ms": sides["served"].ttft_p50_ms - sides["loop"].ttft_p50_ms,
        "lag_p50_ms": lags_ms[len(lags_ms) // 2],
        "lag_p99_ms": lags_ms[len(lags_ms) * 99 // 100],
        "ttft_loop_ms": sides["loop"].ttft_ms,
        "ttft_served_ms": sides["served"].ttft_ms,
        "to_engine_ms": 1e3
        * statistics.fmean(departures.arrived_s[answer.request_id] - answer.sent_s for answer in served_answers),
        "first_token_lag_ms": 1e3
        * statistics.fmean(answer.times_s[0] - departures.left_s[answer.request_id][0] for answer in served_answers),
        "cpu_ms_per_token": {name: 1e3 * cpu_s / num_tokens for name, cpu_s in times.cpu_s.items()},
    }


def model_row(model: str) -> dict[str, Any]:
    args = AppArgs(model=model, served_model_name=MODEL_NAME, metrics_port=0, num_threads=1)
    sides = {"loop": Side(), "served": Side()}
    times = ProcessTimes()
    loop = LoopSide(import_builder(ENGINE_BUILDER), args.to_engine_config())
    with served(args, ENGINE_BUILDER) as url:
        for round_ in range(NUM_ROUNDS):
            sides["loop"].add(loop.run(MODEL_WORKLOAD, round_))
            times.begin()
            sides["served"].add(ServedSide(url).run(MODEL_WORKLOAD, round_))
            times.end()
    loop.close()
    best = {name: max(side.tokens_per_s) for name, side in sides.items()}
    num_tokens = sum(answer.num_tokens for answer in sides["served"].answers)
    return {
        "row": MODEL_ROW,
        "throughput_share": best["served"] / best["loop"],
        "loop_tokens_per_s": best["loop"],
        "served_tokens_per_s": best["served"],
        "cpu_ms_per_token": {name: 1e3 * cpu_s / num_tokens for name, cpu_s in times.cpu_s.items()},
    }


@contextlib.contextmanager
def served(args: AppArgs, engine_builder: str) -> Iterator[str]:
    """The URL of the application, on a local Ray that ends with the block."""
    running = RunningApp(None)
    port = free_port()
    try:
        running.start_ray()
        running.deploy(build_with_engine(args, engine_builder), "127.0.0.1", port)
        yield f"http://127.0.0.1:{port}"
    finally:
        running.stop_app()
        running.stop_ray()


def missed_goals(rows: list[dict[str, Any]]) -> list[str]:
    by_name = {row["row"]: row for row in rows}
    checks = [
        ("paced_1", "ttft_added_ms", lambda value, goal: value <= goal),
        ("paced_32", "lag_p50_ms", lambda value, goal: value < goal),
        (MODEL_ROW, "throughput_share", lambda value, goal: value >= goal),
    ]
    return [
        f"{row}: {name} {by_name[row][name]:.2f}, the goal is {GOALS[name]:g}"
        for row, name, holds in checks
        if row in by_name and not holds(by_name[row][name], GOALS[name])
    ]


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    return round(value, 3) if isinstance(value, float) else value


def main() -> int:
    parser = Parser("benchmarks.serving", __doc__)
    parser.add_argument("--json", action="store_true", help="a line of JSON for each row")
    parser.add_argument("--model", default="demo", help=f"of the row {MODEL_ROW}")
    parser.add_argument("--rows", nargs="+", action=NamesOnce, choices=ROWS, default=ROWS)
    parser.add_argument("--throughput-mode", action="store_true", help="HAProxy in place of Serve's own proxy")
    args = parser.parse_args()
    if MODEL_ROW in args.rows:  # its turn comes last
        with parser.refusing():
            resolve_model(args.model)
    if args.throughput_mode:
        os.environ.update(THROUGHPUT_MODE)  # before Ray starts its processes
    with tempfile.TemporaryDirectory() as log:
        os.environ[LOG_VARIABLE] = log
        paced = [workload for workload in PACED_WORKLOADS if f"paced_{workload.num_streams}" in args.rows]
        rows = paced_rows(Path(log), paced) if paced else []
    if MODEL_ROW in args.rows:
        rows.append(model_row(args.model))
    for row in map(rounded, rows):
        print(json.dumps(row) if args.json else "  ".join(f"{name} {value}" for name, value in row.items()))
    missed = missed_goals(rows)
    for line in missed:
        print(f"missed: {line}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    run_program(main)
