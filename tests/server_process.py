"""`stallfree serve` as a child process: started, waited for, ended with everything it started.

Knows addresses and processes, nothing of requests.
"""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

STOP_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class ServerProcess:
    """A server that has said its one line. `url` and `scrape_url` have no path."""

    process: "subprocess.Popen[str]"
    url: str
    scrape_url: str
    log: Path

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until(condition: Callable[[], bool], timeout_s: float) -> float:
    """Seconds until it held."""
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() - began_s < timeout_s, f"not within {timeout_s} s"
        time.sleep(0.05)
    return time.monotonic() - began_s


def alive(processes: list[psutil.Process]) -> list[str]:
    """The names of those that run."""
    names = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                names.append(process.name())
    return names


@contextlib.contextmanager
def serving(log: Path, *options: str) -> Iterator[ServerProcess]:
    """A server on ports of its own; whatever it leaves behind is ended with the block."""
    port, scrape_port = free_port(), free_port()
    command = [sys.executable, "-m", "deployments.cli.main", "serve", *options]
    command += ["--port", str(port), "--metrics-port", str(scrape_port)]
    # To a file: a pipe that nobody reads would fill up.
    with log.open("w") as err:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True)
    server = ServerProcess(process, f"http://127.0.0.1:{port}", f"http://127.0.0.1:{scrape_port}", log)
    family: list[psutil.Process] = []
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("Serving "), log.read_text()
        family = server.family()
        yield server
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.communicate(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        for child in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
