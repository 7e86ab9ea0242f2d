"""An engine without a model at the seam of `worker.engine_loop`: the real scheduler and blocks, canned tokens.

Each answer counts 1, 2, 3, ...: a token that is lost, doubled or given to another request shows at once.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from scheduler import RequestTooLargeError, Scheduler, SequenceEnd
from scheduler.records import StepRecord
from tests.scheduling import Stepper
from worker.engine_loop import EngineLoop
from worker.request_checks import RequestError
from worker.types import EngineLoad, EngineRequest, SamplingParams, TokenEvent


def request(request_id: str, *, num_prompt_tokens: int = 5, max_tokens: int = 8, n: int = 1) -> EngineRequest:
    return EngineRequest(request_id, [7] * num_prompt_tokens, SamplingParams(max_tokens, n=n))


class SteppableEngine:
    """`before_step` is called in each step with its number: it may raise, wait or look on."""

    def __init__(self, before_step: Callable[[int], None] = lambda number: None) -> None:
        self.before_step = before_step
        self.stepper = Stepper(mode="swap", max_num_seqs=16, num_blocks=40, num_host_blocks=40)
        self.num_steps = 0
        self.num_integrity_checks = 0
        self._events: list[TokenEvent] = []

    def add_request(self, request: EngineRequest, now: float) -> None:
        if request.params.n != 1:
            raise RequestError("n: only 1")
        try:
            self.stepper.add(request.request_id, len(request.prompt_token_ids), request.params.max_tokens)
        except RequestTooLargeError as error:
            raise RequestError(str(error)) from error
        self.stepper.samples[request.request_id] = [10 + number for number in range(request.params.max_tokens)]

    def abort(self, request_id: str) -> None:
        self._report(self.stepper.scheduler.abort(request_id))

    def finish(self, request_id: str, index: int, num_tokens: int) -> None:
        self._report(self.stepper.scheduler.finish(request_id, index))

    def has_unfinished(self) -> bool:
        return self.stepper.scheduler.has_unfinished() or bool(self._events)

    def step(self, now: float) -> list[TokenEvent]:
        self.num_steps += 1
        self.before_step(self.num_steps)
        stepper = self.stepper
        outputs = stepper.plan()
        samples: dict[int, list[int]] = {}
        newest: dict[str, TokenEvent] = {}
        for chunk in outputs.chunks:
            if chunk.do_sample:
                samples[chunk.seq_id] = [stepper.samples[chunk.request_id].pop(0)]
                newest[chunk.request_id] = TokenEvent(chunk.request_id, 0, samples[chunk.seq_id])
        if not outputs.is_empty:
            for end in stepper.scheduler.update(outputs.step_id, samples, now):
                newest[end.request_id].finish_reason = end.finish_reason
        events, self._events = self._events + list(newest.values()), []
        return events

    @property
    def scheduler(self) -> Scheduler:
        return self.stepper.scheduler

    def load(self) -> EngineLoad:
        queues, blocks = self.stepper.scheduler.queues, self.stepper.blocks
        return EngineLoad(
            len(queues.waiting),
            len(queues.running),
            len(queues.swapped),
            self.stepper.scheduler.num_queued_tokens(),
            blocks.num_free_device_blocks,
            blocks.num_used_device_blocks,
            blocks.num_used_host_blocks,
            blocks.num_free_host_blocks,
        )

    def records_since(self, step_id: int) -> list[StepRecord]:
        return self.stepper.scheduler.records.since(step_id)

    def check_integrity(self) -> None:
        self.num_integrity_checks += 1
        self.stepper.blocks.check_integrity()
        assert self.stepper.blocks.num_used_device_blocks == 0

    def _report(self, ends: list[SequenceEnd]) -> None:
        self._events += [TokenEvent(end.request_id, end.index, [], None, end.finish_reason) for end in ends]


class Mailbox:
    """What the loop delivered, by request; may be waited on from any thread."""

    def __init__(self) -> None:
        self.deliveries: list[list[TokenEvent]] = []
        self._changed = threading.Condition()

    def deliver(self, events: list[TokenEvent]) -> None:
        with self._changed:
            self.deliveries.append(events)
            self._changed.notify_all()

    def events(self, request_id: str) -> list[TokenEvent]:
        return [event for events in self.deliveries for event in events if event.request_id == request_id]

    def tokens(self, request_id: str) -> list[int]:
        return [token_id for event in self.events(request_id) for token_id in event.token_ids]

    def wait_for_tokens(self, request_id: str, count: int, timeout_s: float = 10.0) -> None:
        self._wait(lambda: len(self.tokens(request_id)) >= count, timeout_s, f"{count} tokens of {request_id}")

    def wait_for_end(self, request_id: str, timeout_s: float = 10.0) -> TokenEvent:
        self._wait(lambda: bool(self._ends(request_id)), timeout_s, f"the end of {request_id}")
        (end,) = self._ends(request_id)
        return end

    def _ends(self, request_id: str) -> list[TokenEvent]:
        return [event for event in self.events(request_id) if event.finish_reason is not None]

    def _wait(self, is_there: Callable[[], bool], timeout_s: float, what: str) -> None:
        with self._changed:
            assert self._changed.wait_for(is_there, timeout_s), f"{what} did not come"


class Running:
    """A loop, its engine, and what came out of it."""

    def __init__(self, engine: SteppableEngine, deliver: Callable[[list[TokenEvent]], None] | None = None) -> None:
        self.engine = engine
        self.mailbox = Mailbox()
        self.deaths: list[BaseException] = []
        self.died = threading.Event()
        self.loop = EngineLoop(engine, deliver or self.mailbox.deliver, self._on_death)

    def _on_death(self, error: BaseException) -> None:
        self.deaths.append(error)
        self.died.set()


@contextmanager
def running(
    before_step: Callable[[int], None] = lambda number: None,
    deliver: Callable[[list[TokenEvent]], None] | None = None,
) -> Iterator[Running]:
    run = Running(SteppableEngine(before_step), deliver)
    run.loop.start()
    try:
        yield run
    finally:
        run.loop.stop(10.0)
        assert not run.loop.status().alive


def wait_until(holds: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s, "it did not come about"
        time.sleep(0.002)


def slowly(number: int) -> None:
    time.sleep(0.002)
