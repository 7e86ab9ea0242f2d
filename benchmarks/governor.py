"""What `--target-itl-ms` keeps, and what it costs: in the simulator with recorded noise, and on the real engine.

Simulated: step times are those of this machine (a recorded run, or --recording FILE), each times a recorded deviation
drawn again. The governor is compared with every static budget; the best one is the fastest whose 99th percentile of
inter-token times meets the target. Live: the 99th percentile of inter-token times of several runs, each of a fresh
engine. Both keep so many requests of the trace open all the time, so that a prompt is always waiting. Prints a JSON
line for each target.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.driving import Lengths, drive, trace_lengths
from benchmarks.machine import Machine, NoisySteps, machine_of
from benchmarks.options import Parser, count, existing_file, positive, run_program, trace_file, whole_number
from benchmarks.simulated import BLOCK_SIZE, DecodeSteps, simulate
from deployments.bench.stats import percentile
from scheduler import SchedulerConfig
from worker.config import EngineConfig
from worker.engine import Engine

TRACE = Path("../shared/data/traces/azure_2023_code.csv")
MAX_BUDGET = 512
NUM_SIMULATED, NUM_LIVE = 400, 32
SCALE_INPUT, NUM_OUTPUT_TOKENS = 0.25, 64
SEEDS = (0, 1, 2)


def simulated_run(
    machine: Machine, lengths: Sequence[Lengths], concurrency: int, seed: int, *, budget: int, target_ms: float
) -> dict[str, float]:
    """One run on the virtual clock. `target_ms` 0: a static budget."""
    config = SchedulerConfig(
        max_num_batched_tokens=budget,
        max_num_seqs=min(concurrency, budget),
        max_model_len=max(sum(size) for size in lengths),
        chunk_alignment=min(BLOCK_SIZE, budget),
        target_itl_ms=target_ms,
    )
    decode_steps = DecodeSteps()
    report = simulate(
        lengths, config, NoisySteps(machine, Random(seed)), concurrency=concurrency, listeners=[decode_steps]
    )
    num_tokens = sum(num_in + num_out for num_in, num_out in lengths)
    return {
        "budget": budget,
        "p99_itl_ms": percentile(report.inter_token_s, 99.0) * 1e3,
        "p99_step_ms": percentile(decode_steps.durations_s, 99.0) * 1e3,
        "tokens_per_s": num_tokens / report.run_s,
    }


def medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(run[name] for run in runs), 2) for name in runs[0]}


def simulated(
    machine: Machine,
    lengths: Sequence[Lengths],
    concurrency: int,
    target_ms: float,
    *,
    seeds: Sequence[int] = SEEDS,
    budget_step: int = BLOCK_SIZE,
) -> dict[str, Any]:
    """The governor and every static budget, medians over seeds. `share_of_best_static` None: no budget meets it."""

    def run(budget: int, target: float) -> dict[str, float]:
        return medians(
            [simulated_run(machine, lengths, concurrency, seed, budget=budget, target_ms=target) for seed in seeds]
        )

    governed = run(MAX_BUDGET, target_ms)
    best: dict[str, float] | None = None
    for budget in range(concurrency + BLOCK_SIZE, MAX_BUDGET + 1, budget_step):
        static = run(budget, 0.0)
        if static["p99_itl_ms"] <= target_ms and (best is None or static["tokens_per_s"] > best["tokens_per_s"]):
            best = static
        elif static["p99_itl_ms"] > 2 * target_ms:
            break  # larger ones only take longer
    return {
        "governed": governed,
        "best_static": best,
        "p99_itl_over_target": round(governed["p99_itl_ms"] / target_ms, 3),
        "p99_step_over_target": round(governed["p99_step_ms"] / target_ms, 3),
        "share_of_best_static": None if best is None else round(governed["tokens_per_s"] / best["tokens_per_s"], 3),
    }


def live(args: argparse.Namespace, lengths: Sequence[Lengths], target_ms: float) -> dict[str, Any]:
    config = EngineConfig(
        model=args.model,
        max_num_batched_tokens=MAX_BUDGET,
        max_model_len=max(sum(size) for size in lengths),
        target_itl_ms=target_ms,
        num_threads=args.num_threads,
    )
    p99s_ms: list[float] = []
    rates: list[float] = []
    for seed in range(args.runs):
        run = drive(Engine(config), lengths, args.concurrency, Random(seed))
        p99s_ms.append(percentile(run.gaps_s, 99.0) * 1e3)
        rates.append(run.tokens_per_s)
    return {
        "p99_itl_ms": [round(p99_ms, 2) for p99_ms in p99s_ms],
        "tokens_per_s": round(statistics.median(rates), 1),
        "p99_itl_over_target": round(statistics.median(p99s_ms) / target_ms, 3),
    }


def main() -> None:
    parser = Parser("benchmarks.governor", __doc__)
    add = parser.add_argument
    add("--model", default="demo")
    add("--num-threads", type=count)
    add("--target-itl-ms", type=positive, nargs="+", default=[50.0, 100.0], help="(default: 50 100)")
    add("--concurrency", type=whole_number(1, MAX_BUDGET - BLOCK_SIZE), default=16,
        help="requests that are open all the time")  # fmt: skip
    add("--trace", type=trace_file, default=str(TRACE), help="(default: %(default)s)")
    add("--recording", type=existing_file, help="step times are fitted to it; otherwise to a run that is recorded now")
    add("--runs", type=whole_number(0), default=5, help="live runs; 0: the simulator alone (default: %(default)s)")
    add("--live-only", action="store_true")
    args = parser.parse_args()
    if args.live_only and not args.runs:
        parser.error("--runs: 0 with --live-only leaves nothing to do")
    with parser.refusing():
        measure(args)


def measure(args: argparse.Namespace) -> None:
    machine = None if args.live_only else machine_of(args.recording, args.model, args.num_threads)
    for target_ms in args.target_itl_ms:
        result: dict[str, Any] = {"target_ms": target_ms, "concurrency": args.concurrency}
        if machine is not None:
            lengths = trace_lengths(args.trace, NUM_SIMULATED, SCALE_INPUT, NUM_OUTPUT_TOKENS)
            result["simulated"] = simulated(machine, lengths, args.concurrency, target_ms)
        if args.runs:
            lengths = trace_lengths(args.trace, NUM_LIVE, SCALE_INPUT, NUM_OUTPUT_TOKENS)
            result["live"] = live(args, lengths, target_ms)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    run_program(main)
