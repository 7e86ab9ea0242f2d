"""A Ray cluster of this machine for tests, started by a process of its own.

Ray forks while threads of gRPC and torch run. In a process that has had many of them, as one that runs tests has, now
and then a fork never comes to run its program, and Ray gives the start up. So the cluster is started by a fresh
process, a start that failed is ended with all that it left and tried again, and the test only connects.
"""

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private.authentication.authentication_token_setup import enable_token_auth_by_default

_NUM_STARTS = 3
_START_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class StartedRay:
    """`address` is what `ray.init` and `--address` take; `dashboard` is a URL, or empty without `include_dashboard`."""

    address: str
    dashboard: str


@contextmanager
def local_ray(**options: Any) -> Iterator[StartedRay]:
    """Runs until the end of the block. `options` are those of `ray.init`, as JSON; the environment is this one's."""
    # As for a cluster that `ray.init` starts in this process; one that it connects to by address is not asked.
    enable_token_auth_by_default()
    for attempt in range(_NUM_STARTS):
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.ray_start", json.dumps(options)],
            cwd=Path(__file__).resolve().parents[1],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            line = _first_line(process)
            if line:
                yield StartedRay(**json.loads(line))
                return
        finally:
            _end(process)
        print(f"start {attempt + 1} of Ray failed: its reason is above", file=sys.stderr)
    raise RuntimeError(f"Ray did not start, {_NUM_STARTS} times")


def _first_line(process: subprocess.Popen[str]) -> str:
    """Empty if the process ended, or had to be ended, before it wrote one."""
    assert process.stdout is not None
    timer = threading.Timer(_START_TIMEOUT_S, process.kill)
    timer.start()
    try:
        return process.stdout.readline()
    finally:
        timer.cancel()


def _end(process: subprocess.Popen[str]) -> None:
    """The cluster and whatever it started."""
    assert process.stdin is not None
    assert process.stdout is not None
    family = psutil.Process(process.pid).children(recursive=True)
    process.stdin.close()
    _, alive = psutil.wait_procs([psutil.Process(process.pid), *family], timeout=_END_TIMEOUT_S)
    for member in alive:
        member.kill()
    process.wait()
    process.stdout.close()


def main() -> None:
    context = ray.init(address="local", log_to_driver=False, logging_level=logging.ERROR, **json.loads(sys.argv[1]))
    dashboard = f"http://{context.dashboard_url}" if context.dashboard_url else ""
    print(json.dumps({"address": context.address_info["gcs_address"], "dashboard": dashboard}), flush=True)
    sys.stdin.read()
    ray.shutdown()


if __name__ == "__main__":
    main()
