"""`TimeLimit`: Python code that may take so long and no longer, on any thread. Knows nothing of what the code does.

A thread cannot be ended from outside, but Python can raise an exception in one, at its next bytecode. So loops and
recursion end; a single call into C, such as the multiplication of two huge numbers, ends only by itself.
"""

import ctypes
import queue
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

#: until the watcher has made up its mind, which takes it a few bytecodes
_DECISION_S = 0.0002


class TimeLimitExceeded(BaseException):
    """Not an `Exception`: code that is to be ended must not take it for one of its own errors."""


@dataclass(slots=True)
class _Run:
    """Each flag is set once, by one thread: `is_over` by the one that runs, the others by the watcher. It announces
    itself before it looks at `is_over`, and the runner looks for that after it set it, so that no exception is raised
    in a thread that has gone on to something else."""

    thread_id: int
    ends_s: float
    is_over: bool = False
    is_announced: bool = False
    is_decided: bool = False
    is_ended: bool = False


class TimeLimit:
    """One limit for any number of runs at once. One thread watches them, in the order in which they began, which is
    the order in which they end; it starts with the first run and ends with this object."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._runs: queue.SimpleQueue[_Run | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_watched = False

    def run(self, work: Callable[[], T]) -> T:
        """What `work` returns. Raises TimeLimitExceeded once its time has passed."""
        self._watch()
        run = _Run(threading.get_ident(), time.monotonic() + self._limit_s)
        self._runs.put(run)
        try:
            return work()
        finally:
            run.is_over = True
            while run.is_announced and not run.is_decided:
                time.sleep(_DECISION_S)
            if run.is_ended:
                _raise_in(run.thread_id, None)  # in case it has not come yet

    def _watch(self) -> None:
        with self._lock:
            if self._is_watched:
                return
            self._is_watched = True
        threading.Thread(target=_watch, args=(self._runs,), name="time-limit", daemon=True).start()
        weakref.finalize(self, self._runs.put, None)


def _watch(runs: "queue.SimpleQueue[_Run | None]") -> None:
    while (run := runs.get()) is not None:
        rest_s = run.ends_s - time.monotonic()
        if rest_s > 0 and not run.is_over:
            time.sleep(rest_s)
        run.is_announced = True
        if not run.is_over:
            run.is_ended = True
            _raise_in(run.thread_id, TimeLimitExceeded)
        run.is_decided = True


def _raise_in(thread_id: int, kind: type[BaseException] | None) -> None:
    """None takes back what has not come yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread_id), None if kind is None else ctypes.py_object(kind)
    )
