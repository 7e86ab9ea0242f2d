"""A local Ray cluster that ends unasked is seen to, whichever way its processes end. No Ray is needed for that."""

import contextlib
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from deployments.cli.ray_watch import RayWatch
from tests.server_process import alive

#: many looks
SEEN_TIMEOUT_S = 10.0

#: A process with a "Ray" of its own, and one that the raylet has started and nobody else knows; it says their ids.
_MAIN = """
import subprocess, sys, time
from deployments.cli import ray_watch

gcs, raylet = (subprocess.Popen([f"{sys.argv[1]}/{name}", "60"]) for name in ("gcs_server", "raylet"))
lost = subprocess.run(
    "sleep 60 >/dev/null 2>&1 & echo $!", shell=True, env={"RAY_RAYLET_PID": str(raylet.pid)}, capture_output=True
)
print(gcs.pid, raylet.pid, int(lost.stdout), flush=True)
say = lambda why: print(why, flush=True)
if sys.argv[2] == "watches":
    ray_watch.end_with_ray(say)
    time.sleep(60)
else:
    ray_watch._ORDERLY_END_TIMEOUT_S = 0.5
    with ray_watch.ending_ray(say):
        pass
    with ray_watch.ending_ray(say):
        time.sleep(60)
"""


class Told:
    def __init__(self) -> None:
        self.names: list[str] = []
        self.anything = threading.Event()

    def __call__(self, name: str) -> None:
        self.names.append(name)
        self.anything.set()


@contextlib.contextmanager
def sleeping() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            yield process
        finally:
            process.kill()


def watched(told: Told, **processes: "subprocess.Popen[bytes]") -> RayWatch:
    return RayWatch({name: psutil.Process(process.pid) for name, process in processes.items()}, told)


@pytest.mark.parametrize("is_reaped", [False, True])
def test_the_first_process_that_ends_is_told_once(is_reaped: bool):
    told = Told()
    with sleeping() as lasting, sleeping() as killed:
        watch = watched(told, lasting=lasting, killed=killed)
        killed.kill()
        if is_reaped:
            killed.wait()
        assert told.anything.wait(SEEN_TIMEOUT_S)
        lasting.kill()
        watch.end()
    assert told.names == ["killed"]


def test_an_ended_watch_tells_nothing():
    told = Told()
    with sleeping() as process:
        watched(told, process=process).end()
        process.kill()
        assert not told.anything.wait(0.8)


def test_what_has_ended_before_the_watch_is_told():
    told = Told()
    with sleeping() as process:
        watch = watched(told, process=process)
        process.kill()
        psutil.wait_procs([psutil.Process(process.pid)])
        watch.end()
    assert told.names == ["process"]


@pytest.mark.parametrize(
    ("mode", "why"),
    [("watches", "gcs_server is gone\n"), ("ends Ray in vain", "it did not do so in order within 0.5 s\n")],
)
def test_nothing_is_left_of_a_cluster_whose_gcs_server_is_killed(mode: str, why: str, tmp_path: Path):
    for name in ("gcs_server", "raylet"):
        shutil.copy(str(shutil.which("sleep")), tmp_path / name)
    command = [sys.executable, "-c", _MAIN, str(tmp_path), mode]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as main:
        assert main.stdout is not None
        processes = [psutil.Process(int(pid)) for pid in main.stdout.readline().split()]
        assert alive(processes) == ["gcs_server", "raylet", "sleep"]
        processes[0].kill()
        assert main.stdout.read() == why
        assert main.wait(SEEN_TIMEOUT_S) == 1
    assert alive(processes) == []
