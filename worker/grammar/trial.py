"""`GrammarTrial`: a process of its own that compiles a grammar first, so that one that hangs or crashes hurts nobody.

No thread can be stopped inside a library; a process can. Knows what it is told of a vocabulary, no requests.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import worker
from worker.grammar.errors import GrammarBusyError, GrammarError
from worker.grammar.vocabulary import Vocabulary
from worker.types import GrammarSpec

_PROGRAM = "worker.grammar.trial_process"
_READ_BYTES = 1 << 16


class GrammarTrial:
    """One grammar at a time, from one thread at a time. The process is started when it is first needed, and anew after
    a grammar that it did not survive."""

    def __init__(self, vocabulary: Vocabulary, limit_s: float) -> None:
        self._vocabulary = vocabulary
        self._limit_s = limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self._unread = b""

    def check(self, spec: GrammarSpec, deadline_s: float) -> str:
        """The grammar in the library's terms. `deadline_s` is by `time.monotonic`.

        Raises GrammarError for what is wrong with it, that it takes more than `limit_s` seconds included, and
        GrammarBusyError where the process was not ready in time.
        """
        process = self._ready_process(deadline_s)
        self._send(process, [spec.kind, spec.text])
        try:
            verdict = self._receive(process, time.monotonic() + self._limit_s)
        except TimeoutError:
            self.close()
            raise GrammarError(f"it takes more than {self._limit_s:g} s to compile") from None
        except EOFError:
            self.close()
            raise GrammarError("it is nested too deeply or needs too much memory") from None
        if "error" in verdict:
            raise GrammarError(verdict["error"])
        grammar: str = verdict["grammar"]
        return grammar

    def close(self) -> None:
        """End the process, if there is one. A later check starts it again."""
        if self._process is not None:
            self._ender()
            self._process = None

    def _ready_process(self, deadline_s: float) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = _start()
            self._ender = weakref.finalize(self, _end, self._process)
            self._is_ready, self._unread = False, b""
            vocabulary = self._vocabulary
            self._send(
                self._process,
                {
                    "token_bytes": [token.hex() for token in vocabulary.token_bytes],
                    "special_ids": vocabulary.special_ids,
                    "eos_token_ids": vocabulary.eos_token_ids,
                },
            )
        process = self._process
        if not self._is_ready:
            try:
                self._receive(process, deadline_s)
            except TimeoutError:
                raise GrammarBusyError("the process that looks at grammars is still starting") from None
            except EOFError:
                self.close()
                raise GrammarBusyError("the process that looks at grammars did not start") from None
            self._is_ready = True
        return process

    def _send(self, process: subprocess.Popen[bytes], value: Any) -> None:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its output has ended too, and reading tells
            process.stdin.write(json.dumps(value).encode() + b"\n")
            process.stdin.flush()

    def _receive(self, process: subprocess.Popen[bytes], deadline_s: float) -> Any:
        """Raises TimeoutError, and EOFError where the process has ended."""
        assert process.stdout is not None
        while b"\n" not in self._unread:
            remaining_s = deadline_s - time.monotonic()
            readable, _, _ = select.select([process.stdout], [], [], max(0.0, remaining_s))
            if not readable:
                raise TimeoutError
            piece = os.read(process.stdout.fileno(), _READ_BYTES)
            if not piece:
                raise EOFError
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)


def _start() -> subprocess.Popen[bytes]:
    packages = str(Path(worker.__path__[0]).parent)
    path = os.pathsep.join([packages, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-m", _PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):  # what it had not read is lost with it
            pipe.close()
