"""`GrammarChecks`: whether a grammar can be used, found out off the caller's thread, in bounded time, and remembered.

Owns the limits of what is looked at, and the verdicts. Compiles nothing in this process.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from worker.grammar.errors import GrammarBusyError, GrammarError
from worker.grammar.trial import GrammarTrial
from worker.grammar.vocabulary import Vocabulary
from worker.types import GrammarSpec


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """`compile_s` is what a grammar may take to compile, `wait_s` the time from being asked for to being looked at.
    `num_cached` bounds the verdicts, and the compiled grammars, that are kept."""

    max_chars: int = 128 * 1024
    compile_s: float = 2.0
    wait_s: float = 2.5
    num_cached: int = 256


CHECK_LIMITS = GrammarLimits()


class GrammarChecks:
    """Every call returns at once. One grammar is looked at at a time."""

    def __init__(self, vocabulary: Callable[[], Vocabulary], limits: GrammarLimits = CHECK_LIMITS) -> None:
        """`vocabulary` is called once, in this object's thread, when the first grammar comes."""
        self.limits = limits
        self._vocabulary = vocabulary
        self._trial: GrammarTrial | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar-checks")
        self._verdicts: OrderedDict[GrammarSpec, str | GrammarError] = OrderedDict()
        self._lock = threading.Lock()

    def submit(self, spec: GrammarSpec) -> Future[str]:
        """The grammar in the library's terms, or GrammarError or GrammarBusyError."""
        if len(spec.text) > self.limits.max_chars:
            return _settled(GrammarError(f"it has {len(spec.text)} characters; at most {self.limits.max_chars} may be"))
        verdict = self._known(spec)
        if verdict is not None:
            return _settled(verdict)
        return self._thread.submit(self._check, spec, time.monotonic() + self.limits.wait_s)

    def warm_up(self) -> None:
        """Start the trial's process now, so that the first grammar need not wait for it. Returns at once."""
        self._thread.submit(self._check, GrammarSpec("json_object", ""), time.monotonic() + self.limits.wait_s)

    def close(self) -> None:
        """Ends the trial's process, after what it is looking at. Nothing may be submitted any more."""
        self._thread.shutdown(cancel_futures=True)
        if self._trial is not None:
            self._trial.close()

    def _check(self, spec: GrammarSpec, deadline_s: float) -> str:
        verdict = self._known(spec)
        if verdict is None:
            if time.monotonic() > deadline_s:
                raise GrammarBusyError("too many new grammars are waiting to be looked at")
            verdict = self._try(spec, deadline_s)
            with self._lock:
                self._verdicts[spec] = verdict
                if len(self._verdicts) > self.limits.num_cached:
                    self._verdicts.popitem(last=False)
        if isinstance(verdict, GrammarError):
            raise _anew(verdict)
        return verdict

    def _try(self, spec: GrammarSpec, deadline_s: float) -> str | GrammarError:
        try:
            if self._trial is None:
                self._trial = GrammarTrial(self._vocabulary(), self.limits.compile_s)
            return self._trial.check(spec, deadline_s)
        except GrammarError as error:
            return error

    def _known(self, spec: GrammarSpec) -> str | GrammarError | None:
        with self._lock:
            verdict = self._verdicts.get(spec)
            if verdict is not None:
                self._verdicts.move_to_end(spec)
            return verdict


def _settled(verdict: str | GrammarError) -> Future[str]:
    future: Future[str] = Future()
    if isinstance(verdict, GrammarError):
        future.set_exception(_anew(verdict))
    else:
        future.set_result(verdict)
    return future


def _anew(error: GrammarError) -> GrammarError:
    """One that is raised again and again would gather the tracebacks of all who met it."""
    return GrammarError(str(error))
