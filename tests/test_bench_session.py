"""The order of a benchmark on a virtual clock: warm-up, sweeps, rounds, the search; and the engine as a target."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.bench.capacity import Capacity
from deployments.bench.driver import Run, drive
from deployments.bench.engine_target import EngineTarget
from deployments.bench.mixes import parse_mix
from deployments.bench.plots import inter_token_times, latency_against_rate, save
from deployments.bench.progress import bar
from deployments.bench.prompts import PromptMaker
from deployments.bench.requests import Answer, PlannedRequest
from deployments.bench.results import Results
from deployments.bench.session import Measured, Session, SessionSettings
from deployments.bench.slo import Slo
from deployments.bench.target import TargetError
from deployments.bench.workloads import SyntheticWorkload
from tests.fake_bench_target import OneAtATime, PacedTarget
from tests.virtual_time import run_virtually
from worker.types import EngineRequest, TokenEvent


def session(*, slo: Slo | None = None, num_requests: int = 10, num_warm_up: int = 2, **more: Any) -> Session:
    workload = SyntheticWorkload(parse_mix("chat:1@10/4"), 0, num_requests)
    return Session(SessionSettings(workload, slo or Slo(), None, 1000.0, num_warm_up, **more))


def test_warm_up_goes_one_by_one_and_fails_only_if_nothing_works() -> None:
    target = PacedTarget()
    warming = session(num_warm_up=3)
    run_virtually(warming.warm_up(target))
    assert target.calls == [(0, 0), (1, 0), (2, 0)]
    with pytest.raises(TargetError, match="paced: refused"):
        run_virtually(session().warm_up(PacedTarget(failing=frozenset({0}))))


def test_the_pace_of_a_lone_request_is_the_gap_of_an_idle_target() -> None:
    assert run_virtually(session().solo_gap_s(PacedTarget(gap_s=0.03))) == pytest.approx(0.03)


def test_a_sweep_runs_each_rate_with_prompts_of_its_own() -> None:
    target = PacedTarget()
    measured = run_virtually(session().sweep(target, [1.0, 4.0]))
    assert [one.summary.offered_rate for one in measured] == pytest.approx([1.0, 4.0])
    assert {run for run, _ in target.calls} == {0, 1}


def test_targets_that_are_compared_take_turns_and_see_the_same_prompts() -> None:
    order: list[tuple[str, int]] = []

    class Noting(PacedTarget):
        async def ask(self, answer: Answer, run: int) -> None:
            if answer.request.number == 0:
                order.append((self.name, run))
            await super().ask(answer, run)

    rounds = run_virtually(session().compare([Noting(name="a"), Noting(name="b")], 2.0, 3))
    assert order == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert [len(of_target) for of_target in rounds] == [3, 3]


def test_a_search_finds_the_capacity_of_a_server_that_serves_one_at_a_time() -> None:
    searching = session(slo=Slo(ttft_s=1.0), trial_s=200.0, max_search_s=1e9)
    found, measured = run_virtually(searching.capacity(OneAtATime(service_s=0.5, gap_s=0.01), 0.3))
    assert found.rate is not None
    # It serves 2 a second; with Poisson arrivals the median wait passes the limit somewhat before that.
    assert 1.2 < found.rate < 2.0
    assert found.lowest_miss is not None
    assert found.lowest_miss <= found.rate * 1.05 + 1e-9
    assert [one.summary.abandoned is None for one in measured] == [trial.miss is None for trial in found.trials]


def test_a_trial_that_is_lost_is_not_driven_to_its_end() -> None:
    searching = session(slo=Slo(ttft_s=1.0), trial_s=100.0, max_search_s=1.0)
    _, measured = run_virtually(searching.capacity(OneAtATime(service_s=10.0), 1.0))
    (only,) = measured
    assert only.summary.abandoned == "ttft"
    assert only.run.answers[-1].sent_s is None


# --- the engine as a target


class ManualLoop:
    """Answers what was submitted when told to, in the caller's thread."""

    def __init__(self) -> None:
        self.requests: dict[str, EngineRequest] = {}
        self.aborted: list[str] = []
        self.is_stopped = False

    def start(self) -> None:
        pass

    def stop(self, timeout_s: float) -> None:
        self.is_stopped = True

    def submit(self, request: EngineRequest) -> None:
        self.requests[request.request_id] = request

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)


def with_engine_target(use: Any) -> Any:
    async def body() -> Any:
        loop, target = ManualLoop(), EngineTarget("engine", PromptMaker(1000, 0, 512))
        target.attach(loop)
        await target.open()
        result = await asyncio.wait_for(use(loop, target), 30.0)
        await target.close()
        assert loop.is_stopped
        return result

    return asyncio.run(body())


def test_an_engines_events_become_deliveries_and_an_end() -> None:
    answer = Answer(PlannedRequest(3, 0.0, 20, 3), 0.0)

    async def use(loop: ManualLoop, target: EngineTarget) -> None:
        asking = asyncio.create_task(target.ask(answer, 5))
        await asyncio.sleep(0)
        ((request_id, request),) = loop.requests.items()
        assert len(request.prompt_token_ids) == 20
        assert (request.params.max_tokens, request.params.temperature, request.params.ignore_eos) == (3, 0.0, True)
        target.deliver([TokenEvent(request_id, 0, [7]), TokenEvent("of somebody else", 0, [1])])
        target.deliver([TokenEvent(request_id, 0, [8, 9], finish_reason="length")])
        await asking

    with_engine_target(use)
    assert (len(answer.delivery_times_s), answer.num_output_tokens, answer.num_input_tokens) == (2, 3, 20)


@pytest.mark.parametrize(("reason", "error"), [("error", "too long"), ("abort", "abort")])
def test_an_engines_refusal_is_a_failed_request(reason: str, error: str) -> None:
    async def use(loop: ManualLoop, target: EngineTarget) -> None:
        asking = asyncio.create_task(target.ask(Answer(PlannedRequest(0, 0.0, 20, 3), 0.0), 0))
        await asyncio.sleep(0)
        (request_id,) = loop.requests
        shown = error if reason == "error" else None
        target.deliver([TokenEvent(request_id, 0, [], finish_reason=reason, error=shown)])
        with pytest.raises(TargetError, match=error):
            await asking

    with_engine_target(use)


def test_a_request_that_times_out_is_aborted_in_the_engine() -> None:
    async def use(loop: ManualLoop, target: EngineTarget) -> Run:
        run = await drive(target, [PlannedRequest(0, 0.0, 5, 3)], run_number=4, timeout_s=0.1)
        assert loop.aborted == ["bench-4-0"]
        target.deliver([TokenEvent("bench-4-0", 0, [], finish_reason="abort")])
        return run

    run = with_engine_target(use)
    assert run.answers[0].error == "no end within 0.1 s"


# --- what is shown


def measured_by(coroutine: Coroutine[Any, Any, list[Measured]]) -> list[Measured]:
    return run_virtually(coroutine)


def test_plots_mark_every_stall_and_leave_out_runs_that_were_ended_early(tmp_path: Path) -> None:
    measured = measured_by(session().sweep(PacedTarget(gap_s=0.02), [1.0, 2.0]))
    run = measured[0].run
    run.answers[0].delivery_times_s[-1] += 5.0
    figure = inter_token_times(run, 0.1)
    level, stalls = figure.axes[0].collections
    assert len(level.get_offsets()) == 29
    assert len(stalls.get_offsets()) == 1
    measured[1].summary.abandoned = "ttft"
    rates = latency_against_rate([one.summary for one in measured], Slo(ttft_s=1.0))
    assert list(rates.axes[0].lines[0].get_xdata()) == pytest.approx([1.0])
    for number, one in enumerate((figure, rates)):
        path = tmp_path / f"{number}.png"
        save(one, path)
        assert path.read_bytes().startswith(b"\x89PNG")


def test_the_run_to_look_at_is_the_highest_rate_that_went_to_its_end() -> None:
    results = Results("w", Slo(), 0)
    results.measured = measured_by(session().sweep(PacedTarget(), [1.0, 4.0, 2.0]))
    assert results.shown_runs() == [results.measured[1]]
    results.measured[1].run.abandoned = "itl"
    assert results.shown_runs() == [results.measured[2]]


def test_results_are_json_even_where_everything_was_sent_at_once() -> None:
    results = Results("w", Slo(itl_s=0.1), 0)
    results.measured = measured_by(session().sweep(PacedTarget(), [float("inf")]))
    results.capacities["t"] = Capacity(None, 0.05, "min_rate")
    shown = results.to_dict()
    assert shown["runs"][0]["offered_rate"] is None
    assert shown["slo"] == {"ttft_ms": None, "itl_ms": 100.0, "solo_itl_ms": None}


@given(st.integers(0, 30), st.integers(0, 30))
@settings(deadline=None)
def test_the_bar_shows_what_has_ended(num_requests: int, num_ended: int) -> None:
    answers = [Answer(PlannedRequest(n, 0.0, 1, 1), 0.0, sent_s=0.0) for n in range(num_requests)]
    for answer in answers[:num_ended]:
        answer.ended_s = 1.0
    shown = bar("t", answers, 3.0)
    num_ended = min(num_ended, num_requests)
    assert f"{num_ended}/{num_requests} t: {num_requests - num_ended} open" in shown
    assert shown.count("#") == (24 * num_ended // num_requests if num_requests else 0)
