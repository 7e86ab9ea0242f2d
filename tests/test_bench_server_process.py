"""A server of the comparison through HTTP as a process: ready, frozen, ended with all it started. Stand-ins only."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.servers.process import RESUME_TIMEOUT_S, RunningServer, ServerError
from tests.bench_stand_ins import BARE_STAND_IN, ROOT, stand_in
from tests.server_process import alive, free_port, wait_until

#: starts and freezes a server, says which processes that is, and waits: `PROGRAM PORT PROGRAM_OF_SERVER LOG`
STARTER = """
import os, signal, sys, time
from pathlib import Path
from benchmarks.servers.__main__ import interrupt_on_signals
from benchmarks.servers.commands import ServerCommand
from benchmarks.servers.process import RunningServer

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may ignore it, and so would this process
interrupt_on_signals()
port, program, log = sys.argv[1:]
command = ServerCommand("frozen", [sys.executable, "-c", program, port], dict(os.environ), "")
with RunningServer(command, int(port), Path(log)) as server:
    pids = [process.pid for process in server.processes()]
    server.pause()
    print(*pids, flush=True)
    time.sleep(600)
"""


def test_a_server_is_ready_inside_frozen_at_will_and_gone_after(tmp_path: Path) -> None:
    port = free_port()
    with RunningServer(stand_in("fake", port), port, tmp_path / "log") as server:
        (process,) = server.processes()
        assert server.start_s > 0
        server.pause()
        wait_until(lambda: process.status() == psutil.STATUS_STOPPED, 10.0)
        server.resume()
        assert process.status() != psutil.STATUS_STOPPED
        server.pause()
        assert (tmp_path / "log").read_text().startswith("a line of its log\n")
    assert not process.is_running()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_a_frozen_server_ends_with_all_it_started_when_its_starter_is_killed(
    number: signal.Signals, tmp_path: Path
) -> None:
    port = free_port()
    command = [sys.executable, "-c", STARTER, str(port), BARE_STAND_IN, str(tmp_path / "log")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as starter:
        try:
            assert starter.stdout is not None
            pids = [int(word) for word in starter.stdout.readline().split()]
            family = [psutil.Process(pid) for pid in pids]
            assert len(family) == 2
            wait_until(lambda: all(process.status() == psutil.STATUS_STOPPED for process in family), 10.0)
            starter.send_signal(number)
            starter.wait(20.0)
        finally:
            starter.kill()
    wait_until(lambda: not alive(family), 20.0)


def test_what_a_server_leaves_behind_when_it_ends_is_ended(tmp_path: Path) -> None:
    port = free_port()
    command = stand_in("bare", port, program=BARE_STAND_IN)
    with RunningServer(command, port, tmp_path / "log") as server:
        family = server.processes()
        assert len(family) == 2
        next(process for process in family if process.name() != "sleep").kill()
        wait_until(lambda: not alive(family), 10.0)
        began_s = time.monotonic()
        with pytest.raises(ServerError, match="bare ended with exit code 137"):
            server.resume()
        assert time.monotonic() - began_s < RESUME_TIMEOUT_S / 3


def test_a_server_that_does_not_start_says_why_and_one_that_hangs_is_ended(tmp_path: Path) -> None:
    port = free_port()
    broken = stand_in("broken", port, program="import sys; print('loading'); sys.exit('no such model')")
    with (
        pytest.raises(ServerError, match="broken ended with exit code 1: no such model"),
        RunningServer(broken, port, tmp_path / "log"),
    ):
        pass
    with (
        RunningServer(stand_in("first", port), port, tmp_path / "log"),
        pytest.raises(ServerError, match="another server answers at"),
        RunningServer(stand_in("second", port), port, tmp_path / "log"),
    ):
        pass
    hanging = stand_in("hanging", port, program="import time; time.sleep(60)")
    began_s = time.monotonic()
    with (
        pytest.raises(ServerError, match=r"not ready within 0.5 s: it printed nothing"),
        RunningServer(hanging, port, tmp_path / "log", start_timeout_s=0.5),
    ):
        pass
    assert time.monotonic() - began_s < 30.0
