"""`python -m tests.gpu`, which `run.sh` calls: options, parts, exit code."""

import argparse
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from tests.gpu.parts import MACHINE, PARTS, TOTAL_BUDGET_S
from tests.gpu.report import Report
from tests.gpu.run_parts import run_parts
from tests.gpu.sizes import DRY_RUN, ON_GPU


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests/gpu/run.sh", description="The check on one GPU.", allow_abbrev=False)
    parser.add_argument("--dry-run", action="store_true", help="the same code on the CPU, with tiny sizes")
    parser.add_argument("--only", metavar="PARTS", help=f"some of {','.join(PARTS)}; {MACHINE} is always run")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write a JSON line for each row, as it ends")
    options = parser.parse_args()
    wanted = set(options.only.split(",")) | {MACHINE} if options.only else set(PARTS)
    if unknown := sorted(wanted - set(PARTS)):
        parser.error(f"there is no part {', '.join(unknown)}: {', '.join(PARTS)}")
    names = [name for name in PARTS if name in wanted]
    if options.dry_run:
        for name in names:  # once, for all the processes that are forked from this one
            with suppress(ImportError):  # the part's own row tells of it
                import_module(PARTS[name].module)
    try:
        report = Report(options.json)
    except OSError as error:
        parser.error(f"--json: {options.json} cannot be written: {error.strerror}")
    run_parts(names, PARTS, DRY_RUN if options.dry_run else ON_GPU, report, TOTAL_BUDGET_S)
    report.close()
    return 1 if report.has_failed else 0


if __name__ == "__main__":
    sys.exit(main())
