"""Throughput where half of the cache is missing: recompute, swap and auto on the real engine, in turn.

So many requests are open at once; the pool holds half of what they come to. Prints a JSON line for each mode: the
median of output tokens a second, every run, and what was preempted; the last line says how far `auto` is from the
better of the other two.
"""

import argparse
import json
import statistics
from random import Random
from typing import Any

from benchmarks.driving import Lengths, drive
from benchmarks.options import Parser, count, number_from, run_program
from scheduler.config import PreemptionMode
from worker.config import EngineConfig, blocks_for
from worker.engine import Engine

CONCURRENCY = 32
NUM_REQUESTS = 40
INPUT_TOKENS = (64, 448)
OUTPUT_TOKENS = (64, 320)
MAX_MODEL_LEN = INPUT_TOKENS[1] + OUTPUT_TOKENS[1]
BLOCK_SIZE = 16
OVERSUBSCRIPTION = 2.0
MODES = tuple(mode.value for mode in PreemptionMode)


def lengths_of(round_number: int) -> list[Lengths]:
    """The same for every mode."""
    draw = Random(f"lengths {round_number}")
    return [(draw.randint(*INPUT_TOKENS), draw.randint(*OUTPUT_TOKENS)) for _ in range(NUM_REQUESTS)]


def num_pool_blocks(oversubscription: float) -> int:
    """What `CONCURRENCY` requests of average length come to at their ends, over the oversubscription."""
    mean_tokens = (sum(INPUT_TOKENS) + sum(OUTPUT_TOKENS)) // 2
    return 1 + int(CONCURRENCY * blocks_for(mean_tokens, BLOCK_SIZE) / oversubscription)


def engine_config(args: argparse.Namespace, mode: str) -> EngineConfig:
    num_blocks = num_pool_blocks(args.oversubscription)
    return EngineConfig(
        model=args.model,
        num_threads=args.num_threads,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=CONCURRENCY,
        num_device_blocks=num_blocks,
        # The host holds whatever is pushed out: the modes are compared, not the size of the host pool.
        num_host_blocks=int(num_blocks * args.oversubscription),
        preemption_mode=mode,
        enable_prefix_caching=not args.no_prefix_caching,
    )


def main() -> None:
    parser = Parser("benchmarks.preemption", __doc__)
    add = parser.add_argument
    add("--model", default="demo")
    add("--num-threads", type=count)
    add("--rounds", type=count, default=3)
    add("--oversubscription", type=number_from(1.0), default=OVERSUBSCRIPTION, help="(default: %(default)s)")
    add("--no-prefix-caching", action="store_true", help="what recompute throws away is never found again")
    args = parser.parse_args()
    if num_pool_blocks(args.oversubscription) < (least := 1 + blocks_for(MAX_MODEL_LEN, BLOCK_SIZE)):
        parser.error(f"--oversubscription: leaves less than the {least} blocks that the longest request needs")
    with parser.refusing():
        engines = {mode: Engine(engine_config(args, mode)) for mode in MODES}
    rates: dict[str, list[float]] = {mode: [] for mode in MODES}
    for number in range(args.rounds):
        for mode in reversed(MODES) if number % 2 else MODES:
            run = drive(engines[mode], lengths_of(number), CONCURRENCY, Random(number))
            rates[mode].append(run.output_tokens_per_s)
    for mode in MODES:
        print(json.dumps(line_of(mode, rates[mode], engines[mode])), flush=True)
    print(json.dumps({"auto_over_better": round(auto_over_better(rates), 3)}))


def line_of(mode: str, rates: list[float], engine: Engine) -> dict[str, Any]:
    totals = engine.totals
    return {
        "mode": mode,
        "output_tokens_per_s": round(statistics.median(rates), 1),
        "runs": [round(rate, 1) for rate in rates],
        "preemptions": {"recompute": totals.num_preemptions_recompute, "swap": totals.num_preemptions_swap},
        "discarded_tokens": totals.num_discarded_tokens,
        "swapped_blocks": totals.num_blocks_swapped_out + totals.num_blocks_swapped_in,
    }


def auto_over_better(rates: dict[str, list[float]]) -> float:
    """The median over the rounds of auto's rate over the better of the other two, of those whose median is better."""
    others = [mode for mode in MODES if mode != PreemptionMode.AUTO.value]
    better = max(others, key=lambda mode: statistics.median(rates[mode]))
    pairs = zip(rates[PreemptionMode.AUTO.value], rates[better], strict=True)
    return statistics.median(auto / other for auto, other in pairs)


if __name__ == "__main__":
    run_program(main)
