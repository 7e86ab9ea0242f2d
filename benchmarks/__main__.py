"""The main table: what the engine reaches here, in a few minutes: `python -m benchmarks`, or `make bench`.

Runs the benchmarks beside it, each in a process of its own, one after the other, and puts their lines into one
table, as Markdown. Knows none of their insides, only the JSON that they print.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.documents import document_with, with_table
from benchmarks.options import Parser, run_program

Line = dict[str, Any]
#: the lines of a document between which the table stands
BEGIN, END = "<!-- make bench -->", "<!-- end of make bench -->"
LONG_QUEUE = 10_000
#: what, the figure, and what it is compared with
Cells = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Part:
    """A benchmark: its module and options, and the table's rows for each JSON line that it prints."""

    module: str
    options: tuple[str, ...]
    rows: Callable[[Line], list[Cells]]


def engine_rows(line: Line) -> list[Cells]:
    name = line["row"]
    if "step_ms" not in line:
        return [(f"`{name}`", f"{line['tokens_per_s']:,.0f} tokens/s", "")]
    bound = f"{line['ratio']:.2f} x the {line['bound_ms']:.2f} ms of reading from memory"
    return [(f"`{name}`", f"{line['tokens_per_s']:,.0f} tokens/s, {line['step_ms']:.2f} ms a decode step", bound)]


def gap_rows(line: Line) -> list[Cells]:
    chunked, default = line["policies"]["chunked_prefill"], line["policies"]["default"]
    what = (
        f"worst gap of {line['num_answers']} running answers while a prompt of {line['num_prompt_tokens']:,} comes in"
    )
    times = default["worst_gap_ms"] / chunked["worst_gap_ms"]
    return [(what, f"{chunked['worst_gap_ms']:.0f} ms", f"`default`: {default['worst_gap_ms']:,.0f} ms, {times:.1f} x")]


def scheduler_rows(line: Line) -> list[Cells]:
    """Of the cases with a queue the longest one in the plain order: the others cost the same."""
    if line["waiting"] and (line["waiting"] < LONG_QUEUE or line["queue_policy"] != "fcfs"):
        return []
    what = f"scheduler, {line['running']:,} running, {line['waiting']:,} waiting ({line['queue_policy']})"
    step_ms = line["us_per_sequence"] * line["running"] / 1e3
    return [(what, f"{line['us_per_sequence']:.2f} µs for each of them", f"{step_ms:.2f} ms a step")]


def record_rows(line: Line) -> list[Cells]:
    what = f"step records and what `explain` keeps, {line['running']:,} running"
    both_us = line["record_us"] + line["explain_us"]
    return [(what, f"{both_us:.0f} µs a step", f"{line['share']:.2%} of the decode step of {line['step_ms']:.0f} ms")]


def python_rows(line: Line) -> list[Cells]:
    what = f"Python per step, {line['running']:,} running"
    return [(what, f"{line['python_ms']:.2f} ms", f"90 of 100 steps within {line['python_p90_ms']:.2f} ms")]


PARTS = (
    Part("benchmarks.engine", ("--json",), engine_rows),
    Part("benchmarks.long_prompt_gap", ("--json",), gap_rows),
    Part("benchmarks.bench_scheduler", (), scheduler_rows),
    Part("benchmarks.step_records", (), record_rows),
    Part("benchmarks.python_per_step", ("--json",), python_rows),
)


def lines_of(part: Part) -> list[Line]:
    """Raises CalledProcessError if the benchmark fails; what it says on standard error is seen as it comes."""
    command = [sys.executable, "-m", part.module, *part.options]
    print(" ".join(["running", *command[1:]]), file=sys.stderr, flush=True)
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def table(rows: list[Cells]) -> str:
    widths = [max(len(row[column]) for row in [*rows, ("", "", "")]) for column in range(3)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def main() -> int:
    parser = Parser("benchmarks", __doc__)
    parser.add_argument("--json", action="store_true", help="the lines of all benchmarks, each with its `benchmark`")
    parser.add_argument("--write", type=document_with(BEGIN, END), metavar="FILE",
                        help="also put the table into this document")  # fmt: skip
    args = parser.parse_args()
    rows: list[Cells] = [(f"on {len(os.sched_getaffinity(0))} cores", "here", "beside it")]
    for part in PARTS:
        try:
            lines = lines_of(part)
        except subprocess.CalledProcessError as error:  # it has said itself what is wrong
            print(f"{part.module} ended with exit code {error.returncode}", file=sys.stderr)
            return 1
        for line in lines:
            if args.json:
                print(json.dumps({"benchmark": part.module, **line}), flush=True)
            rows += part.rows(line)
    if not args.json:
        print(table(rows))
    if args.write is not None:
        args.write.write_text(with_table(args.write.read_text(), table(rows), BEGIN, END))
    return 0


if __name__ == "__main__":
    run_program(main)
