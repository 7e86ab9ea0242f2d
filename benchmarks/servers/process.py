"""A server as a process below this one: started, waited for, frozen while others have their turn, and ended.

Knows a command and an address, nothing of requests beyond the list of models. That all it started ends with it is
`keeper.py`'s work.
"""

import contextlib
import http.client
import json
import subprocess
import sys
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
#: a first answer may wait for a model to be loaded
ASK_TIMEOUT_S = 60.0
_POLL_S = 0.25
_SHOWN_LOG_CHARS = 300

_KEEPER = Path(__file__).parent / "keeper.py"


class ServerError(RuntimeError):
    """A server did not start, or is of no use any more; the message is one line."""


class RunningServer:
    """Use as a context: it is ready inside, and gone after, also if this process is killed. Everything it prints goes
    to `log`."""

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
            # In a session of its own: Ctrl-C and the end of a terminal reach it by way of this process alone.
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(_KEEPER), str(STOP_TIMEOUT_S), *self.command.command],
                env=self.command.environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            while not (self._answers() and self._completes()):
                self.check()
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

    def processes(self) -> list[psutil.Process]:
        """The server and all that it started."""
        assert self._process is not None
        try:
            return psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def pause(self) -> None:
        """Freezes it with all that it started: an idle server takes processor time, too. Once or twice is the same."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()

    def resume(self) -> None:
        """Raises ServerError unless it answers again."""
        for process in reversed(self.processes()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        began_s = time.monotonic()
        while not self._answers():
            self.check()
            if time.monotonic() - began_s > RESUME_TIMEOUT_S:
                raise ServerError(f"{self.name} does not answer after its pause: {self._last()}")
            time.sleep(_POLL_S)

    def check(self) -> None:
        """Raises ServerError if it has ended."""
        assert self._process is not None
        if self._process.poll() is not None:
            raise ServerError(f"{self.name} ended with exit code {self._process.returncode}: {self._last()}")

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/v1/models", timeout=5.0) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError):
            return False

    def _completes(self) -> bool:
        """Some list their model before they have loaded it."""
        try:
            with urllib.request.urlopen(f"{self.url}/v1/models", timeout=ASK_TIMEOUT_S) as response:
                model = json.load(response)["data"][0]["id"]
            body = json.dumps({"model": model, "prompt": "Hello", "max_tokens": 2}).encode()
            request = urllib.request.Request(
                f"{self.url}/v1/completions", body, {"Content-Type": "application/json"}, method="POST"
            )
            with urllib.request.urlopen(request, timeout=ASK_TIMEOUT_S) as response:
                response.read()
                return bool(response.status == 200)
        except (
            urllib.error.URLError,
            http.client.HTTPException,
            ConnectionError,
            TimeoutError,
            LookupError,
            ValueError,
        ):
            return False

    def _last(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1].strip()[:_SHOWN_LOG_CHARS] if lines else "it printed nothing"

    def _stop(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
