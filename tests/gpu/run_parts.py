"""Runs the parts, each in a process of its own and within its time: an error of the device, which spoils a process for
good, ends one part and not the check. Rows come through a pipe as they end, so what a part had found stands.
"""

import multiprocessing
import time
import traceback
from collections.abc import Iterable, Mapping
from importlib import import_module
from multiprocessing.connection import Connection

from tests.gpu.parts import MACHINE, Bench, Part
from tests.gpu.report import Figure, Outcome, Report, Row, Verdict
from tests.gpu.sizes import Sizes

#: how long a process that was killed may take to be gone
KILL_WAIT_S = 10.0
#: rows are one line each
MAX_ERROR_CHARS = 300


def run_parts(
    names: Iterable[str], parts: Mapping[str, Part], sizes: Sizes, report: Report, total_budget_s: float
) -> None:
    """Adds the rows of these parts to `report`, in their order."""
    deadline_s = time.monotonic() + total_budget_s
    facts: dict[str, Figure] = {}
    for name in names:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            report.add(Row(name, "", Verdict.FAILED, 0.0, f"not run: all {total_budget_s:.0f} s are used up"))
            continue
        run_part(name, parts[name], Bench(sizes, facts), report, min(parts[name].budget_s, left_s))
        if name == MACHINE:
            facts = {key: value for row in report.rows for key, value in row.figures.items()}
            if "device_name" not in facts:
                return  # nothing can run, and the row has said why


def run_part(name: str, part: Part, bench: Bench, report: Report, budget_s: float) -> None:
    # A process that has used CUDA cannot be forked; one that has not is not asked to import everything again.
    context = multiprocessing.get_context("fork" if bench.sizes.is_dry_run else "spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run_here, args=(name, part.module, bench, sender), daemon=True)
    began_s = time.monotonic()
    process.start()
    sender.close()
    trouble = _forward(receiver, report, began_s + budget_s)
    if trouble is None:
        process.join()
    else:
        process.kill()
        process.join(KILL_WAIT_S)
        if trouble == "":
            trouble = f"its process ended with code {process.exitcode}"
        report.add(Row(name, "", Verdict.FAILED, time.monotonic() - began_s, f"ended early: {trouble}"))
    receiver.close()


def _forward(receiver: Connection, report: Report, deadline_s: float) -> str | None:
    """Rows from the pipe to the report. None: all came; "" the process is gone; else why it has to be ended."""
    while True:
        if not receiver.poll(max(0.0, deadline_s - time.monotonic())):
            return "it took longer than its time"
        try:
            row = receiver.recv()
        except EOFError:
            return ""
        if row is None:
            return None
        report.add(row)


def _run_here(name: str, module: str, bench: Bench, sender: Connection) -> None:
    began_s = time.monotonic()
    try:
        cases = import_module(module).cases(bench)
    except Exception as error:
        traceback.print_exc()
        sender.send(Row(name, "", Verdict.FAILED, time.monotonic() - began_s, _one_line(error)))
        cases = []
    for case in cases:
        try:
            outcome = case.run()
        except Exception as error:
            traceback.print_exc()
            outcome = Outcome(_one_line(error), verdict=Verdict.FAILED)
        seconds = time.monotonic() - began_s
        sender.send(Row(name, case.name, outcome.verdict, seconds, outcome.text, dict(outcome.figures)))
        began_s = time.monotonic()
    sender.send(None)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:MAX_ERROR_CHARS]
