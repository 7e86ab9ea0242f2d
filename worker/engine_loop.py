"""The engine's thread: takes requests from a queue, steps while there is work, delivers each step's events at once.

Knows neither Ray nor HTTP. When a step raises, the cache and the queues can no longer be trusted: every open request
ends with an error and the loop is dead for good.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue

from scheduler.life_report import LifeReport
from scheduler.limits import StepLimits
from scheduler.records import StepRecord
from worker.arrivals import Arrival, UnpreparedArrivals
from worker.engine import Engine
from worker.request_checks import RequestError
from worker.types import EngineLoad, EngineRequest, TokenEvent

logger = logging.getLogger(__name__)

#: an engine without work looks after its books this often
IDLE_CHECK_PERIOD_S = 1.0


@dataclass(frozen=True, slots=True)
class LoopStatus:
    """`step_age_s` is how long the step now running has run; 0.0 between steps."""

    alive: bool
    step_id: int
    step_age_s: float
    load: EngineLoad
    error: str | None


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class _Finish:
    request_id: str
    index: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The grammar of a request is compiled, or cannot be."""

    request_id: str


@dataclass(frozen=True, slots=True)
class _LifeQuestion:
    request_id: str
    answer: "Future[LifeReport | None]"


_Command = Arrival | _Prepared | _Abort | _Finish | _LifeQuestion | StepLimits | None


class EngineLoop:
    """`submit`, `abort`, `finish` and `status` may be called from any thread and return at once."""

    def __init__(
        self,
        engine: Engine,
        deliver: Callable[[list[TokenEvent]], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        """`deliver` gets all events of a step, `on_death` the error that ended the loop; both in the loop's thread."""
        self._engine = engine
        self._deliver = deliver
        self._on_death = on_death
        self._commands: SimpleQueue[_Command] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)
        self._open: dict[str, set[int]] = {}
        self._unprepared = UnpreparedArrivals()
        self._lock = threading.Lock()
        self._is_stopping = False
        self._error: BaseException | None = None
        self._step_id = 0
        self._step_began_s: float | None = None
        self._load = engine.load()
        #: submitted and not yet taken in by the engine, so that the load does not show them
        self._num_new_requests = 0
        self._num_new_tokens = 0
        self._limits = engine.scheduler.limits

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End after the step now running. Open requests get no event: whoever stops the loop has ended them."""
        self._is_stopping = True
        self._commands.put(None)
        self._thread.join(timeout_s)

    def submit(self, request: EngineRequest) -> None:
        """A refusal comes back as an event with finish reason "error", as does the death of the loop."""
        with self._lock:
            if request.request_id in self._open:
                raise ValueError(f"request {request.request_id} is already open")
            if self._error is None and not self._is_stopping:
                self._open[request.request_id] = set(request.open_samples)
                self._num_new_requests += 1
                self._num_new_tokens += request.num_known_tokens
                grammar = None if request.params.grammar is None else self._engine.grammars.prepare(request)
                self._commands.put(Arrival(request, time.monotonic(), grammar))
                return
        error = "the engine is stopping" if self._error is None else f"the engine is dead: {self._error!r}"
        self._deliver(
            [_failure(request.request_id, index, error, is_worker_lost=True) for index in request.open_samples]
        )

    def abort(self, request_id: str) -> None:
        self._commands.put(_Abort(request_id))

    def finish(self, request_id: str, index: int, num_tokens: int) -> None:
        self._commands.put(_Finish(request_id, index, num_tokens))

    def life(self, request_id: str) -> "Future[LifeReport | None]":
        """What the request's time was spent on, answered between two steps; never by a loop that is dead or hangs."""
        question = _LifeQuestion(request_id, Future())
        self._commands.put(question)
        return question.answer

    def set_limits(self, limits: StepLimits) -> None:
        """Hold from the next step on. Raises `LimitError` and changes nothing for what cannot hold here."""
        self._engine.scheduler.check_limits(limits)
        self._limits = limits
        self._commands.put(limits)

    @property
    def limits(self) -> StepLimits:
        """As they are, or will be in the next step."""
        return self._limits

    def status(self) -> LoopStatus:
        began_s = self._step_began_s
        age_s = 0.0 if began_s is None else time.monotonic() - began_s
        error = None if self._error is None else repr(self._error)
        alive = self._error is None and self._thread.is_alive()
        return LoopStatus(alive, self._step_id, age_s, self._load_with_new(), error)

    def _load_with_new(self) -> EngineLoad:
        """A burst that comes during one step must be seen by whoever counts the queue."""
        with self._lock:
            load, num_requests, num_tokens = self._load, self._num_new_requests, self._num_new_tokens
        if num_requests == 0:
            return load
        return replace(
            load,
            num_waiting=load.num_waiting + num_requests,
            num_queued_tokens=load.num_queued_tokens + num_tokens,
        )

    def records_since(self, step_id: int) -> list[StepRecord]:
        return self._engine.records_since(step_id)

    # -- the loop's own thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._take_commands()
                if self._engine.has_unfinished():
                    self._step()
        except BaseException as error:
            self._die(error)

    def _take_commands(self) -> None:
        """All that is there; waits for the first one while there is no work."""
        obeyed: list[_Command] = []
        try:
            if not self._engine.has_unfinished():
                obeyed.append(self._commands.get(timeout=IDLE_CHECK_PERIOD_S))
                self._obey(obeyed[-1])
            while True:
                obeyed.append(self._commands.get_nowait())
                self._obey(obeyed[-1])
        except Empty:
            if obeyed:
                # What came or went shows at once, not after a step that may be long or never come.
                self._show_load(obeyed)
            if not self._engine.has_unfinished():
                self._engine.check_integrity()

    def _show_load(self, obeyed: list[_Command]) -> None:
        load = self._unprepared.added_to(self._engine.load())
        arrived = [command.request for command in obeyed if isinstance(command, Arrival)]
        with self._lock:
            self._load = load
            self._num_new_requests -= len(arrived)
            self._num_new_tokens -= sum(request.num_known_tokens for request in arrived)

    def _obey(self, command: _Command) -> None:
        if isinstance(command, Arrival):
            if not self._unprepared.hold(command, lambda request_id: self._commands.put(_Prepared(request_id))):
                self._add(command)
        elif isinstance(command, _Prepared):
            arrival = self._unprepared.take(command.request_id)
            if arrival is not None:
                self._add(arrival)
        elif isinstance(command, _Abort):
            self._abort(command.request_id)
        elif isinstance(command, _Finish):
            self._engine.finish(command.request_id, command.index, command.num_tokens)
        elif isinstance(command, _LifeQuestion):
            if command.answer.set_running_or_notify_cancel():
                command.answer.set_result(self._engine.lives.report(command.request_id))
        elif isinstance(command, StepLimits):
            self._engine.scheduler.set_limits(command)

    def _add(self, arrival: Arrival) -> None:
        """`arrival` waits for nothing any more."""
        error = None if arrival.grammar is None else arrival.grammar.exception()
        if error is not None:
            self._refuse(arrival.request, f"grammar: {error}")
            return
        try:
            self._engine.add_request(arrival.request, arrival.time_s)
        except RequestError as error:
            self._refuse(arrival.request, str(error))

    def _abort(self, request_id: str) -> None:
        arrival = self._unprepared.take(request_id)
        if arrival is None:
            self._engine.abort(request_id)
            return
        assert arrival.grammar is not None
        arrival.grammar.cancel()
        self._send(
            [TokenEvent(request_id, index, [], finish_reason="abort") for index in arrival.request.open_samples]
        )

    def _refuse(self, request: EngineRequest, message: str) -> None:
        self._send(
            [_failure(request.request_id, index, message, is_refusal=True) for index in request.open_samples]
        )

    def _step(self) -> None:
        self._step_began_s = now = time.monotonic()
        events = self._engine.step(now)
        self._step_began_s = None
        self._step_id += 1
        self._load = self._unprepared.added_to(self._engine.load())
        if events:
            self._send(events)

    def _send(self, events: list[TokenEvent]) -> None:
        for event in events:
            if event.finish_reason is not None:
                self._close(event)
        self._deliver(events)

    def _close(self, event: TokenEvent) -> None:
        with self._lock:
            indices = self._open[event.request_id]
            indices.discard(event.index)
            if not indices:
                del self._open[event.request_id]

    def _die(self, error: BaseException) -> None:
        logger.error("the engine loop has died", exc_info=error)
        with self._lock:
            self._error = error
            lost = [(request_id, index) for request_id, indices in self._open.items() for index in sorted(indices)]
            self._open.clear()
        self._step_began_s = None
        message = f"the engine died: {error!r}"
        try:
            self._deliver([_failure(request_id, index, message, is_worker_lost=True) for request_id, index in lost])
        finally:
            # Whoever watches over the process has to know, even if it is the delivery that fails.
            self._on_death(error)


def _failure(
    request_id: str, index: int, message: str, *, is_refusal: bool = False, is_worker_lost: bool = False
) -> TokenEvent:
    return TokenEvent(request_id, index, [], None, "error", message, is_refusal, is_worker_lost)
