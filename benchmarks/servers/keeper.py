"""A server and all that it starts, ended together: `python -I keeper.py STOP_TIMEOUT_S COMMAND...`

Runs the command until its own standard input ends, which happens in whatever way the process at the other end goes, or
until a signal; exits as the command did. Loads nothing of this project and knows nothing of what it runs.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_POLL_S = 0.02


def _end_with_keeper() -> None:
    """In the child. SIGKILL, as it may be stopped by then, and a stopped process acts on no other signal."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Keeper:
    """Whatever the server starts remains below this process, in whatever session, whether or not its parent lives."""

    def __init__(self, command: list[str]) -> None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        # A signal shows as its number here, so that nothing wakes up in between: others are being measured.
        self._signals, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(writing)
        for number in (signal.SIGCHLD, *_ENDING):
            signal.signal(number, lambda *_: None)
        self._server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_end_with_keeper)

    def wait(self) -> None:
        """Until the server has ended or is to end."""
        standard_input = sys.stdin.fileno()
        while self._server.returncode is None:
            ready, _, _ = select.select([self._signals, standard_input], [], [])
            told = self._signals in ready and self._read_signals()
            if told or standard_input in ready:
                return

    def end(self, timeout_s: float) -> int:
        """The exit code. The server alone is told first, since it may have to end its own processes in order."""
        for process in reversed(self._family()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        if self._server.returncode is None:
            os.kill(self._server.pid, signal.SIGTERM)
        deadline_s = time.monotonic() + timeout_s
        while self._server.returncode is None and (left_s := deadline_s - time.monotonic()) > 0:
            if select.select([self._signals], [], [], left_s)[0]:
                self._read_signals()
        deadline_s = time.monotonic() + timeout_s
        while (remaining := self._family()) and time.monotonic() < deadline_s:
            for process in remaining:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(_POLL_S)
            self._reap()
        code = self._server.returncode
        if code is None:
            return 1
        # As a shell says it.
        return code if code >= 0 else 128 - code

    def _family(self) -> list[psutil.Process]:
        return psutil.Process().children(recursive=True)

    def _read_signals(self) -> bool:
        """True if one of them is to end the server."""
        numbers = os.read(self._signals, 4096)
        self._reap()
        return any(number in _ENDING for number in numbers)

    def _reap(self) -> None:
        """Those whose parent has gone, too: whoever else waits for their end must not find them undead."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                if pid == self._server.pid:
                    self._server.returncode = os.waitstatus_to_exitcode(status)


def main() -> int:
    timeout_s, *command = sys.argv[1:]
    try:
        keeper = Keeper(command)
    except OSError as error:
        print(f"cannot be started: {error}", flush=True)
        return 1
    keeper.wait()
    return keeper.end(float(timeout_s))


if __name__ == "__main__":
    sys.exit(main())
