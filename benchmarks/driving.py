"""Drives an engine of this process by hand: so many requests open at once, or arrivals at given times.

Notes the moment of each token. Knows no threads and no event loop: what it measures is the engine alone.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from deployments.bench.loss_watch import LossWatch
from deployments.bench.prompts import PromptMaker
from deployments.bench.requests import Answer, PlannedRequest
from deployments.bench.slo import Slo
from deployments.bench.traces import read_trace
from worker.engine import Engine
from worker.types import EngineRequest, SamplingParams

#: steps between two looks at whether a run can still keep its level
STEPS_BETWEEN_LOOKS = 16
#: lengths of a request: tokens in, tokens out
Lengths = tuple[int, int]


@dataclass(slots=True)
class Driven:
    """Tokens are those of all requests. `gaps_s`: from one token of an answer to its next, over all answers."""

    num_input_tokens: int
    num_output_tokens: int
    run_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)

    @property
    def output_tokens_per_s(self) -> float:
        return self.num_output_tokens / self.run_s

    @property
    def tokens_per_s(self) -> float:
        return (self.num_input_tokens + self.num_output_tokens) / self.run_s


def trace_lengths(path: Path, count: int, scale_input: float, num_output_tokens: int) -> list[Lengths]:
    """Of the first `count` requests of a trace, their inputs scaled and their outputs fixed."""
    records = read_trace(path)[:count]
    return [(max(round(record.num_input_tokens * scale_input), 1), num_output_tokens) for record in records]


def drive(engine: Engine, lengths: Sequence[Lengths], concurrency: int, draw: Random) -> Driven:
    """Keep `concurrency` requests open until all have ended. Prompts are random, so no cache knows them."""
    driven = Driven(sum(size for size, _ in lengths), sum(size for _, size in lengths))
    last_token_s: dict[str, float] = {}
    num_open = place = 0
    began_s = time.monotonic()
    while place < len(lengths) or engine.has_unfinished():
        while place < len(lengths) and num_open < concurrency:
            num_input_tokens, num_output_tokens = lengths[place]
            prompt = draw.choices(range(engine.vocab_size), k=num_input_tokens)
            params = SamplingParams(max_tokens=num_output_tokens, temperature=0.0, ignore_eos=True)
            engine.add_request(EngineRequest(str(place), prompt, params), time.monotonic())
            place += 1
            num_open += 1
        events = engine.step(time.monotonic())
        now = time.monotonic()
        for event in events:
            if event.token_ids:
                before_s = last_token_s.get(event.request_id)
                last_token_s[event.request_id] = now
                if before_s is not None:
                    driven.gaps_s.append(now - before_s)
            num_open -= event.finish_reason is not None
    driven.run_s = time.monotonic() - began_s
    return driven


class BusyClock:
    """The monotonic clock without the time in which there is nothing to do: it can be moved on to the next arrival."""

    def __init__(self) -> None:
        self._skipped_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self._skipped_s

    def skip_to(self, time_s: float) -> None:
        self._skipped_s += max(time_s - self(), 0.0)


def level_missed(
    engine: Engine, clock: BusyClock, plan: Sequence[PlannedRequest], prompts: PromptMaker, run_number: int, slo: Slo
) -> str | None:
    """Sends `plan` at its times and says why it misses the level, as soon as that is certain; None: it keeps it.

    The engine must have been made with this clock. Idle time is skipped, so a low rate takes no longer than its work.
    """
    began_s = clock()
    answers = [Answer(request, began_s + request.arrival_s) for request in plan]
    watch = LossWatch(slo)
    by_id: dict[str, Answer] = {}
    place = num_steps = 0
    while place < len(answers) or engine.has_unfinished():
        if not engine.has_unfinished():
            clock.skip_to(answers[place].intended_s)
        while place < len(answers) and answers[place].intended_s <= clock():
            answer = answers[place]
            request_id = f"{run_number}-{place}"
            by_id[request_id] = answer
            params = SamplingParams(max_tokens=answer.request.num_output_tokens, temperature=0.0, ignore_eos=True)
            token_ids = prompts.token_ids(answer.request, run_number)
            engine.add_request(EngineRequest(request_id, token_ids, params), answer.intended_s)
            place += 1
        events = engine.step(clock())
        now = clock()
        for event in events:
            answer = by_id[event.request_id]
            if event.token_ids:
                answer.delivery_times_s.append(now)
            if event.finish_reason is not None:
                answer.ended_s = now
        num_steps += 1
        if num_steps % STEPS_BETWEEN_LOOKS == 0 and (lost := watch.lost(answers, now)) is not None:
            for request_id in by_id:
                engine.abort(request_id)
            while engine.has_unfinished():
                engine.step(clock())
            return lost
    return slo.miss(answers)
