"""Runs of the real engine: requests in, answers and what the scheduler did out."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler.records import StepRecord
from worker.config import EngineConfig
from worker.engine import Engine, EngineTotals
from worker.types import EngineRequest, SamplingParams


@dataclass(slots=True)
class EngineRun:
    """Answers in the order of the requests; an aborted one keeps the tokens it had."""

    answers: list[list[int]]
    finish_reasons: list[str]
    totals: EngineTotals = field(default_factory=EngineTotals)
    records: list[StepRecord] = field(default_factory=list)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def run_engine(config: EngineConfig, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> EngineRun:
    """A fresh engine answers all prompts, which arrive at once."""
    return run_on(Engine(config), prompts, params)


def run_on(
    engine: Engine,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    *,
    arrival_steps: Sequence[int] | None = None,
    abort_steps: dict[int, int] | None = None,
) -> EngineRun:
    """`arrival_steps[i]`: prompt i arrives before that step; `abort_steps[i]`: it is cancelled before that one."""
    arrivals = arrival_steps or [0] * len(prompts)
    run = EngineRun([[] for _ in prompts], [""] * len(prompts))
    step = 0
    while engine.has_unfinished() or step <= max(arrivals):
        for place, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
            if arrivals[place] == step:
                engine.add_request(EngineRequest(str(place), prompt, sampling), now=float(step))
            if abort_steps and abort_steps.get(place) == step:
                engine.abort(str(place))
        for event in engine.step(now=float(step)):
            place = int(event.request_id)
            assert not run.finish_reasons[place], "an event after the last one"
            run.answers[place] += event.token_ids
            run.finish_reasons[place] = event.finish_reason or ""
        engine.block_manager.check_integrity()
        step += 1
    assert all(run.finish_reasons)
    engine.check_integrity()
    run.totals = engine.totals
    run.records = engine.records_since(-1)
    return run
