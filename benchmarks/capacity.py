"""The load that each policy carries while running answers keep their pace: the highest rate that holds a service level.

The Azure code trace, inputs divided by four, outputs fixed at 64 tokens, its arrivals stretched. The level: the 99th
percentile of inter-token times within so many times the decode step of a lone answer, and the median time to the first
token within a limit (without one, a queue that grows for ever would do). First the token budget of each policy is
chosen in the simulator, all budgets through the same search, with step times of this machine (a recorded run, or
--recording FILE), their noise, and nine tenths of the limit between tokens; then the capacity under that budget is
searched with the real engine, which skips the time in which it has nothing to do. Prints a JSON line for each level;
`none` is a capacity below 0.05 requests a second.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.driving import BusyClock, drive, level_missed
from benchmarks.machine import Machine, NoisySteps, machine_of
from benchmarks.options import (
    BadValueError,
    NamesOnce,
    Parser,
    count,
    existing_file,
    positive,
    run_program,
    trace_file,
    whole_number,
)
from benchmarks.simulated import BLOCK_SIZE, simulate
from deployments.bench.capacity import Capacity, search_capacity
from deployments.bench.prompts import PromptMaker
from deployments.bench.slo import ITL_PERCENTILE, Slo
from deployments.bench.stats import percentile
from deployments.bench.traces import read_trace
from deployments.bench.workloads import TraceWorkload
from deployments.cli.bench_values import share
from scheduler import SchedulerConfig
from scheduler.config import SchedulerPolicy
from worker.config import EngineConfig
from worker.engine import Engine

TRACE = Path("../shared/data/traces/azure_2023_code.csv")
SCALE_INPUT, NUM_OUTPUT_TOKENS = 0.25, 64
BUDGETS = (32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
POLICIES = (SchedulerPolicy.DEFAULT, SchedulerPolicy.CHUNKED_PREFILL)
MAX_NUM_SEQS = 256
SIMULATED_PRECISION = 0.03
#: of the limit between tokens, in the simulator. A budget a little too large carries a small part of what the best one
#: does, so a sweep that goes to the limit itself finds the one that real steps, a little longer, do not carry.
SWEEP_SHARE = 0.9
START_RATE = 1.0
MAX_SIMULATION_S = 600.0
#: the lone answers by which the pace of an idle engine is measured: tokens in, tokens out
SOLO_LENGTHS = [(128, 65)] * 3


@dataclass(frozen=True, slots=True)
class Choice:
    """A policy's best budget, and the rate (requests a second) that it carries in the simulator; None: none does."""

    budget: int
    rate: float | None


def budgets_of(policy: SchedulerPolicy, longest: int) -> list[int]:
    """Those that the policy takes: `default` runs prompts whole."""
    return [budget for budget in BUDGETS if policy is SchedulerPolicy.CHUNKED_PREFILL or budget >= longest]


def simulated_rate(
    machine: Machine, workload: TraceWorkload, num_requests: int, policy: SchedulerPolicy, budget: int, slo: Slo
) -> float | None:
    plan = workload.plan(num_requests, START_RATE)
    lengths = [(request.num_input_tokens, request.num_output_tokens) for request in plan]
    config = SchedulerConfig(
        max_num_batched_tokens=budget,
        max_num_seqs=min(MAX_NUM_SEQS, budget),
        max_model_len=max(sum(size) for size in lengths),
        policy=policy,
        chunk_alignment=min(BLOCK_SIZE, budget),
    )
    assert slo.ttft_s is not None
    assert slo.itl_s is not None

    def miss(rate: float) -> str | None:
        arrivals_s = [request.arrival_s for request in workload.plan(num_requests, rate)]
        report = simulate(lengths, config, NoisySteps(machine, Random(0)), arrivals_s=arrivals_s)
        if percentile(report.ttft_s, 50.0) > slo.ttft_s:
            return "ttft"
        return "itl" if percentile(report.inter_token_s, ITL_PERCENTILE) > slo.itl_s else None

    return search(miss, START_RATE, SIMULATED_PRECISION, MAX_SIMULATION_S).rate


def search(miss: Callable[[float], str | None], start_rate: float, precision: float, max_search_s: float) -> Capacity:
    async def measure(rate: float) -> str | None:
        return miss(rate)

    return asyncio.run(
        search_capacity(
            measure, start_rate=start_rate, precision=precision, max_search_s=max_search_s, clock=time.monotonic
        )
    )


def choose_budget(
    machine: Machine, workload: TraceWorkload, num_requests: int, policy: SchedulerPolicy, slo: Slo
) -> Choice:
    longest = max(sum((r.num_input_tokens, r.num_output_tokens)) for r in workload.plan(num_requests, START_RATE))
    found = [
        Choice(budget, simulated_rate(machine, workload, num_requests, policy, budget, slo))
        for budget in budgets_of(policy, longest)
    ]
    say(f"{policy.value}: " + ", ".join(f"{c.budget}: {as_text(c.rate)}" for c in found))
    return max(found, key=lambda choice: (choice.rate or 0.0, -choice.budget))


def load(
    args: argparse.Namespace, workload: TraceWorkload, policy: SchedulerPolicy, budget: int | None
) -> tuple[Engine, BusyClock]:
    plan = workload.plan(args.num_requests, START_RATE)
    config = EngineConfig(
        model=args.model,
        num_threads=args.num_threads,
        scheduler_policy=policy.value,
        max_num_batched_tokens=budget,
        max_model_len=max(r.num_input_tokens + r.num_output_tokens for r in plan),
    )
    clock = BusyClock()
    return Engine(config, clock), clock


def lone_step_s(args: argparse.Namespace, workload: TraceWorkload) -> float:
    engine, _ = load(args, workload, SchedulerPolicy.CHUNKED_PREFILL, None)
    return statistics.median(drive(engine, SOLO_LENGTHS, 1, Random(0)).gaps_s)


def live_search(
    args: argparse.Namespace,
    workload: TraceWorkload,
    policy: SchedulerPolicy,
    choice: Choice,
    slo: Slo,
    round_number: int,
) -> Capacity:
    engine, clock = load(args, workload, policy, choice.budget)
    drive(engine, SOLO_LENGTHS[:1], 1, Random(0))  # the first requests find everything warm
    prompts = PromptMaker(engine.vocab_size, round_number, workload.prefix_block_tokens)
    num_runs = 0

    def miss(rate: float) -> str | None:
        nonlocal num_runs
        num_runs += 1
        missed = level_missed(engine, clock, workload.plan(args.num_requests, rate), prompts, num_runs, slo)
        say(f"  {rate:.3f} requests/s: {'kept' if missed is None else 'missed, ' + missed}")
        return missed

    return search(miss, choice.rate or START_RATE, args.precision, args.max_search_s)


def measure_level(
    args: argparse.Namespace, machine: Machine, workload: TraceWorkload, factor: float, solo_s: float
) -> dict[str, Any]:
    slo = Slo(args.slo_ttft_ms / 1e3, factor * solo_s)
    policies = [policy for policy in POLICIES if policy.value in args.policies]
    swept = Slo(slo.ttft_s, SWEEP_SHARE * factor * solo_s)
    choices = {policy: choose_budget(machine, workload, args.num_requests, policy, swept) for policy in policies}
    rates: dict[SchedulerPolicy, list[float]] = {policy: [] for policy in policies}
    for number in range(args.rounds):
        for policy in reversed(policies) if number % 2 else policies:
            say(f"{factor:g}x, {policy.value}, budget {choices[policy].budget}, round {number + 1} of {args.rounds}")
            rates[policy].append(live_search(args, workload, policy, choices[policy], slo, number).rate or 0.0)
    return {
        "slo_factor": factor,
        "slo_itl_ms": round(factor * solo_s * 1e3, 1),
        "slo_ttft_ms": args.slo_ttft_ms,
        "policies": {policy.value: policy_result(choices[policy], rates[policy]) for policy in policies},
        "chunked_over_default": ratio(rates),
        "simulated_chunked_over_default": ratio({policy: [choices[policy].rate or 0.0] for policy in policies}),
    }


def policy_result(choice: Choice, rates: Sequence[float]) -> dict[str, Any]:
    return {
        "budget": choice.budget,
        "simulated_rate": as_text(choice.rate),
        "rate": as_text(statistics.median(rates)) if rates else None,
        "runs": [as_text(rate) for rate in rates],
    }


def ratio(rates: dict[SchedulerPolicy, list[float]]) -> float | None:
    """The median of the rounds' ratios; None where `default` carries nothing, or one of the two was not measured."""
    default, chunked = (rates.get(policy, []) for policy in POLICIES)
    if not default or not chunked or min(default) <= 0.0:
        return None
    return round(statistics.median(b / a for a, b in zip(default, chunked, strict=True)), 2)


def as_text(rate: float | None) -> float | str:
    return round(rate, 3) if rate else "none"


def check_trace(workload: TraceWorkload, num_requests: int) -> None:
    """Raises BadValueError for a trace that cannot be stretched, or that `default` cannot run under any budget."""
    try:
        plan = workload.plan(num_requests, START_RATE)
    except ValueError as error:
        raise BadValueError(f"--trace: {error}") from error
    longest = max(request.num_input_tokens + request.num_output_tokens for request in plan)
    if not budgets_of(SchedulerPolicy.DEFAULT, longest):
        raise BadValueError(f"--trace: a request of {longest} tokens, above the largest budget {max(BUDGETS)}")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = Parser("benchmarks.capacity", __doc__)
    add = parser.add_argument
    add("--model", default="demo")
    add("--num-threads", type=count)
    add("--trace", type=trace_file, default=str(TRACE), help="(default: %(default)s)")
    add("--recording", type=existing_file, help="step times are fitted to it; otherwise to a run that is recorded now")
    add("--slo", type=positive, nargs="+", default=[5.0, 25.0], help="times the lone decode step (default: 5 25)")
    names = [policy.value for policy in POLICIES]
    add("--policies", nargs="+", action=NamesOnce, choices=names, default=names, help="to measure them one by one")
    add("--slo-ttft-ms", type=positive, default=2000.0, help="of the median first token (default: %(default)s)")
    add("--rounds", type=whole_number(0), default=3, help="searches with the real engine; 0: the simulator alone")
    add("--num-requests", type=whole_number(2), default=60, help="of the trace, in each trial (default: %(default)s)")
    add("--precision", type=share, default=0.15, help="of the real engine's capacity (default: %(default)s)")
    add("--max-search-s", type=positive, default=120.0, help="no trial begins later in a search (default: %(default)s)")
    args = parser.parse_args()
    workload = TraceWorkload(args.trace.name, read_trace(args.trace), SCALE_INPUT, NUM_OUTPUT_TOKENS)
    with parser.refusing():
        check_trace(workload, args.num_requests)
        machine = machine_of(args.recording, args.model, args.num_threads)
        solo_s = lone_step_s(args, workload)
        for factor in args.slo:
            print(json.dumps(measure_level(args, machine, workload, factor, solo_s)), flush=True)


if __name__ == "__main__":
    run_program(main)
