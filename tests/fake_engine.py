"""A small engine at the seam of `deployments.engine_seam`: no model, deterministic tokens, adjustable steps.

The first prompt token may ask for a special behaviour (`DIE`, `HANG`, `PID`, `PRIORITY`); any other prompt is answered
with tokens that depend on the prompt, the sample and the position alone.
"""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from deployments.model_facts import ModelFacts
from scheduler.config import SchedulerConfig
from scheduler.life_report import LifeReport
from scheduler.limits import StepLimits, check_limits, limits_of
from scheduler.records import StepRecord
from worker.config import EngineConfig
from worker.types import EngineLoad, EngineRequest, TokenEvent

VOCAB_SIZE = 512
BLOCK_SIZE = 16
NUM_BLOCKS = 4096
MAX_MODEL_LEN = 4096
START_CONFIG = SchedulerConfig(max_num_batched_tokens=256, max_num_seqs=64, max_model_len=MAX_MODEL_LEN)

#: the loop raises in the step after this request arrives
DIE = 501
#: the step after this request arrives lasts `HANG_S`
HANG = 502
HANG_S = 1.5
#: the first token of the answer is the process id
PID = 503
#: refused, as a prompt that can never fit
NEVER_FITS = 504
#: the first token of the answer is the request's priority above `PRIORITY_BASE`
PRIORITY = 505
PRIORITY_BASE = 100


def expected_tokens(prompt_token_ids: list[int], num_tokens: int, index: int = 0) -> list[int]:
    base = sum(prompt_token_ids)
    return [(base * 31 + position * 7 + index * 13) % VOCAB_SIZE for position in range(num_tokens)]


@dataclass(slots=True)
class Status:
    alive: bool
    step_id: int
    step_age_s: float
    load: EngineLoad
    error: str | None


@dataclass(slots=True)
class _Running:
    """`outputs` holds the samples that have not ended. `is_computed`: its prompt had its step."""

    request: EngineRequest
    outputs: dict[int, list[int]] = field(default_factory=dict)
    is_computed: bool = False


class FakeLoop:
    """One token for each running request in each step of `step_s`, in a thread, as the real loop does."""

    def __init__(
        self,
        deliver: Callable[[list[TokenEvent]], None],
        on_death: Callable[[BaseException], None],
        step_s: float,
    ) -> None:
        self._deliver = deliver
        self._on_death = on_death
        self.step_s = step_s
        self._start_config = START_CONFIG
        self.limits = limits_of(START_CONFIG)
        self._lock = threading.Lock()
        self._running: dict[str, _Running] = {}
        self._refused: list[TokenEvent] = []
        self._records: list[StepRecord] = []
        self._step_id = 0
        self._step_began_s: float | None = None
        self._error: str | None = None
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.aborted: list[str] = []

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        self._is_stopping.set()
        self._thread.join(timeout_s)

    def submit(self, request: EngineRequest) -> None:
        with self._lock:
            if request.prompt_token_ids[0] == NEVER_FITS:
                error = "the prompt can never fit"
                self._refused.append(
                    TokenEvent(request.request_id, 0, [], finish_reason="error", error=error, is_refusal=True)
                )
            else:
                known = request.output_token_ids or [[]] * request.params.n
                outputs = {index: list(known[index]) for index in request.open_samples}
                self._running[request.request_id] = _Running(request, outputs)

    def abort(self, request_id: str) -> None:
        with self._lock:
            self.aborted.append(request_id)
            self._running.pop(request_id, None)

    def finish(self, request_id: str, index: int, num_tokens: int) -> None:
        with self._lock:
            held = self._running.get(request_id)
            if held is not None and held.outputs.pop(index, None) is not None:
                self._refused.append(TokenEvent(request_id, index, [], finish_reason="stop"))
                if not held.outputs:
                    del self._running[request_id]

    def life(self, request_id: str) -> "Future[LifeReport | None]":
        """This engine keeps no lives."""
        answer: Future[LifeReport | None] = Future()
        answer.set_result(None)
        return answer

    def set_limits(self, limits: StepLimits) -> None:
        check_limits(limits, self._start_config)
        self.limits = limits

    def status(self) -> Status:
        with self._lock:
            began_s = self._step_began_s
            age_s = 0.0 if began_s is None else time.monotonic() - began_s
            return Status(self._error is None, self._step_id, age_s, self._load(), self._error)

    def records_since(self, step_id: int) -> list[StepRecord]:
        with self._lock:
            return [record for record in self._records if record.step_id > step_id]

    def _load(self) -> EngineLoad:
        used = sum(1 + len(held.request.prompt_token_ids) // BLOCK_SIZE for held in self._running.values())
        num_queued = sum(held.request.num_known_tokens for held in self._running.values() if not held.is_computed)
        return EngineLoad(0, len(self._running), 0, num_queued, NUM_BLOCKS - used, used)

    def _run(self) -> None:
        try:
            while not self._is_stopping.is_set():
                self._step()
        except Exception as error:
            self._error = repr(error)
            self._on_death(error)

    def _step(self) -> None:
        with self._lock:
            scheduled = list(self._running)
            first_tokens = {held.request.prompt_token_ids[0] for held in self._running.values()}
            self._step_began_s = time.monotonic() if self._running else None
            self._step_id += bool(self._running)
        if DIE in first_tokens:
            raise RuntimeError("the fake engine was told to die")
        self._is_stopping.wait(HANG_S if HANG in first_tokens else self.step_s)
        with self._lock:
            events, self._refused = self._refused, []
            for request_id in scheduled:
                held = self._running.get(request_id)
                if held is not None:
                    events += [self._advance(held, index) for index in list(held.outputs)]
                    if not held.outputs:
                        del self._running[request_id]
            if self._step_began_s is not None:
                duration_s = time.monotonic() - self._step_began_s
                record = StepRecord(self._step_id, self._step_began_s, 256, num_batched_tokens=len(events))
                record.duration_s = duration_s
                self._records.append(record)
            self._step_began_s = None
        if events:
            self._deliver(events)

    def _advance(self, held: _Running, index: int) -> TokenEvent:
        output = held.outputs[index]
        held.is_computed = True
        position = len(output)
        prompt = held.request.prompt_token_ids
        token_id = expected_tokens(prompt, position + 1, index)[position]
        if position == 0 and prompt[0] == PID:
            token_id = os.getpid()
        if position == 0 and prompt[0] == PRIORITY:
            token_id = PRIORITY_BASE + held.request.priority
        output.append(token_id)
        event = TokenEvent(held.request.request_id, index, [token_id])
        if len(output) >= held.request.params.max_tokens:
            event.finish_reason = "length"
            del held.outputs[index]
        return event


FACTS = ModelFacts(
    max_model_len=MAX_MODEL_LEN,
    vocab_size=VOCAB_SIZE,
    eos_token_ids=(0,),
    block_size=BLOCK_SIZE,
    num_device_blocks=NUM_BLOCKS,
    num_host_blocks=0,
)


def build(
    config: EngineConfig,
    deliver: Callable[[list[TokenEvent]], None],
    on_death: Callable[[BaseException], None],
) -> tuple[ModelFacts, FakeLoop]:
    """The builder of the Ray tests: 100 steps a second."""
    return FACTS, FakeLoop(deliver, on_death, step_s=0.01)


def build_that_fails(
    config: EngineConfig,
    deliver: Callable[[list[TokenEvent]], None],
    on_death: Callable[[BaseException], None],
) -> tuple[ModelFacts, FakeLoop]:
    raise RuntimeError("this engine cannot be built")
