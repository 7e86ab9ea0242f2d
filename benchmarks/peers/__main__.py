"""This engine and its peers on the same rows, in turn: `python -m benchmarks.peers --environments FOLDER`.

Prints one JSON line for each engine and row: the median of `tokens_per_s` over the rounds, every run, and the median
of our rate over theirs, paired within a round. A peer that fails is reported on standard error and left out.
"""

import contextlib
import json
import os
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks.options import NamesOnce, Parser, count, existing_file, existing_folder, name_and_value, run_program
from benchmarks.peers.drivers import OURS, PEERS, Driver, PeerError, Setting
from benchmarks.peers.rows import ROWS
from worker.config import EngineConfig


def run(setting: Setting, engines: Sequence[str], rows: Sequence[str], num_rounds: int) -> Iterator[dict[str, Any]]:
    """Yields a result for each engine and row, when a row is done. Each round asks the engines in turn, every other
    one backwards."""
    with contextlib.ExitStack() as stack:
        drivers: list[Driver] = []
        for engine in engines:
            try:
                drivers.append(stack.enter_context(Driver(engine, setting)))
                _say(f"{drivers[-1].name}: ready after {drivers[-1].start_s:.1f} s")
            except PeerError as error:
                _say(str(error))
        for row in rows:
            runs: dict[str, list[float]] = {driver.engine: [] for driver in drivers}
            for number in range(num_rounds):
                for driver in list(reversed(drivers) if number % 2 else drivers):
                    try:
                        answer = driver.ask(row, number)
                    except PeerError as error:
                        _say(f"{row}: {error}")
                        drivers.remove(driver)
                        del runs[driver.engine]
                        continue
                    runs[driver.engine].append(answer["tokens_per_s"])
                    _say(f"{row} {number + 1}/{num_rounds} {driver.name}: {answer['tokens_per_s']:.1f} tokens/s")
            for driver in drivers:
                yield result(row, driver, runs)


def result(row: str, driver: Driver, runs: dict[str, list[float]]) -> dict[str, Any]:
    own, theirs = runs.get(OURS), runs[driver.engine]
    ratio = None if own is None else statistics.median(a / b for a, b in zip(own, theirs, strict=True))
    return {
        "row": row,
        "engine": driver.name,
        "tokens_per_s": statistics.median(theirs),
        "runs": theirs,
        "stallfree_ratio": ratio,
        "start_s": driver.start_s,
    }


def table(results: Iterable[dict[str, Any]]) -> str:
    by_row: dict[str, dict[str, dict[str, Any]]] = {}
    for item in results:
        by_row.setdefault(item["row"], {})[item["engine"]] = item
    lines = []
    for row, engines in by_row.items():
        for engine, item in engines.items():
            ratio = "" if item["stallfree_ratio"] is None else f"{item['stallfree_ratio']:>8.2f}x"
            lines.append(f"{row:<14}{engine:<42}{item['tokens_per_s']:>10.1f} tokens/s{ratio}")
    return "\n".join(lines)


def parser() -> Parser:
    options = Parser("benchmarks.peers", __doc__)
    add = options.add_argument
    add("--environments", type=existing_folder, required=True, help="the folder that benchmarks/peers/setup.sh filled")
    add("--model", type=existing_folder, help="a folder with safetensors (default: the demo model)")
    add("--gguf", type=existing_file, help="the same model for llama.cpp (default: the demo model, Q4_1)")
    add("--engines", nargs="+", action=NamesOnce, choices=(OURS, *PEERS), default=[OURS, *PEERS])
    add("--rows", nargs="+", action=NamesOnce, choices=tuple(ROWS), default=list(ROWS))
    add("--rounds", type=count, default=3)
    add("--num-threads", type=count, default=len(os.sched_getaffinity(0)), help="of every engine (default: all cores)")
    add("--option", action="append", type=name_and_value, default=[], metavar="NAME=VALUE", help="an option of our "
        "engine; repeat it")  # fmt: skip
    add("--json", action="store_true", help="print the JSON lines alone, no table")
    return options


def main() -> int:
    options = parser()
    args = options.parse_args()
    known = {field.name for field in fields(EngineConfig)}
    if unknown := [option for option in args.option if option.partition("=")[0] not in known]:
        options.error(f"--option: the engine has none of this name: {unknown[0]}")
    model: Path | None = args.model
    if model is None:
        from worker.demo_model import ensure_demo_model

        with options.refusing():
            model = ensure_demo_model()
    setting = Setting(model, args.environments.resolve(), args.gguf, args.num_threads, tuple(args.option))
    results = []
    for item in run(setting, args.engines, args.rows, args.rounds):
        results.append(item)
        if args.json:
            print(json.dumps(item), flush=True)
    if results and not args.json:
        print(table(results))
    return 0 if results else 1


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_program(main)
