"""A server as a child process: started, waited for, frozen while others have their turn, and ended with all it started.

Knows a command and an address, nothing of requests beyond the list of models.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType

import psutil

from benchmarks.servers.commands import HOST, ServerCommand

#: the first start of some servers compiles for minutes
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 40.0
RESUME_TIMEOUT_S = 30.0
_POLL_S = 0.25
_SHOWN_LOG_CHARS = 300


_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def _end_with_parent() -> None:
    """In the child: it is told to end when this process has gone, in whatever way."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class ServerError(RuntimeError):
    """A server did not start; the message is one line."""


class RunningServer:
    """Use as a context: it is ready inside, and gone after. Everything it prints goes to `log`."""

    def __init__(self, command: ServerCommand, port: int, log: Path, start_timeout_s: float = START_TIMEOUT_S) -> None:
        self.command = command
        self.name = command.name
        self.url = f"http://{HOST}:{port}"
        self.start_s = 0.0
        self._log = log
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "RunningServer":
        if self._answers():
            raise ServerError(f"{self.name}: another server answers at {self.url}")
        began_s = time.monotonic()
        with self._log.open("wb") as log:
            # In a session of its own: what outlives the server can be ended with its group.
            self._process = subprocess.Popen(
                self.command.command,
                env=self.command.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        try:
            while not self._answers():
                if self._process.poll() is not None:
                    raise ServerError(f"{self.name} ended with exit code {self._process.returncode}: {self._last()}")
                if time.monotonic() - began_s > self._start_timeout_s:
                    raise ServerError(f"{self.name} was not ready within {self._start_timeout_s:g} s: {self._last()}")
                time.sleep(_POLL_S)
        except BaseException:
            self._stop()
            raise
        self.start_s = time.monotonic() - began_s
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def pause(self) -> None:
        """Freezes it with all that it started: an idle server takes processor time, too. Once or twice is the same."""
        for process in self._family(self.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()

    def resume(self) -> None:
        """Raises ServerError unless it answers again."""
        for process in reversed(self._family(self.pid)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        began_s = time.monotonic()
        while not self._answers():
            if time.monotonic() - began_s > RESUME_TIMEOUT_S:
                raise ServerError(f"{self.name} does not answer after its pause: {self._last()}")
            time.sleep(_POLL_S)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/v1/models", timeout=5.0) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def _last(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1].strip()[:_SHOWN_LOG_CHARS] if lines else "it printed nothing"

    def _stop(self) -> None:
        """The server alone is told first, since it may have to end its own processes in order."""
        process = self._process
        assert process is not None
        family = self._family(process.pid)
        if process.poll() is None:
            for frozen in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    frozen.resume()
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for remaining in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                remaining.kill()
        psutil.wait_procs(family, timeout=STOP_TIMEOUT_S)

    @staticmethod
    def _family(pid: int) -> list[psutil.Process]:
        try:
            root = psutil.Process(pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []
