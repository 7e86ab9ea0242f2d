"""The open loop on a virtual clock: when requests leave, what is measured from when, and what is never averaged in."""

import asyncio

import pytest

from deployments.bench.driver import LEAD_S, Run, drive
from deployments.bench.requests import Answer, PlannedRequest
from deployments.bench.slo import Slo
from deployments.bench.summary import summarize
from tests.fake_bench_target import OneAtATime, PacedTarget
from tests.virtual_time import VirtualLoop, run_virtually


def plan(*arrivals_s: float, num_output_tokens: int = 4) -> list[PlannedRequest]:
    return [PlannedRequest(n, arrival, 10, num_output_tokens) for n, arrival in enumerate(arrivals_s)]


def driven(target: PacedTarget, requests: list[PlannedRequest], timeout_s: float = 100.0) -> Run:
    return run_virtually(drive(target, requests, run_number=7, timeout_s=timeout_s))


def test_every_request_leaves_at_its_moment_and_its_times_are_exact() -> None:
    target = PacedTarget(ttft_s=0.3, gap_s=0.05)
    run = driven(target, plan(0.0, 0.1, 2.0))
    assert run.started_s == pytest.approx(LEAD_S)
    for answer in run.answers:
        assert answer.intended_s == pytest.approx(run.started_s + answer.request.arrival_s)
        assert answer.send_lateness_s == pytest.approx(0.0)
        assert answer.ttft_s == pytest.approx(0.3)
        assert answer.gaps_s == pytest.approx([0.05] * 3)
        assert answer.e2e_s == pytest.approx(0.45)
    assert run.duration_s == pytest.approx(2.45)
    assert target.calls == [(7, 0), (7, 1), (7, 2)]


def test_a_slow_answer_delays_no_other_request() -> None:
    run = driven(PacedTarget(ttft_s=50.0), plan(*[0.1 * n for n in range(20)]))
    assert [answer.sent_s for answer in run.answers] == pytest.approx([answer.intended_s for answer in run.answers])


def test_waiting_at_the_server_counts_into_the_time_to_the_first_token() -> None:
    run = driven(OneAtATime(service_s=1.0, gap_s=0.1), plan(0.0, 0.0, 0.0))
    assert [answer.e2e_s for answer in run.answers] == pytest.approx([1.0, 2.0, 3.0])
    assert [answer.ttft_s for answer in run.answers] == pytest.approx([0.7, 1.7, 2.7])


class BusyClient(PacedTarget):
    """The first request holds up the client's own event loop for two seconds."""

    async def ask(self, answer: Answer, run: int) -> None:
        if answer.request.number == 0:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualLoop)
            loop.skip(2.0)
        await super().ask(answer, run)


def test_a_client_that_is_late_shows_it_and_cannot_hide_the_delay() -> None:
    run = driven(BusyClient(ttft_s=0.3, gap_s=0.05), plan(0.0, 0.5, 3.0))
    held_up = run.answers[1]
    assert held_up.send_lateness_s == pytest.approx(1.5)
    assert held_up.ttft_s == pytest.approx(1.8)
    assert run.answers[2].send_lateness_s == pytest.approx(0.0)
    summary = summarize(run, Slo())
    assert summary.send_lateness.max == pytest.approx(1.5)
    assert summary.loop_lag.max is not None
    assert summary.loop_lag.max > 1.9


def test_failed_requests_are_counted_and_never_averaged_in() -> None:
    run = driven(PacedTarget(failing=frozenset({1, 3})), plan(0.0, 0.1, 0.2, 0.3))
    summary = summarize(run, Slo(ttft_s=1.0, itl_s=1.0))
    assert (summary.num_complete, summary.num_failed, summary.num_unfinished) == (2, 2, 0)
    assert summary.errors == {"refused": 2}
    assert summary.latencies.ttft.count == summary.latencies.e2e.count == 2
    assert summary.latencies.itl.count == 6
    assert summary.num_good == 2
    assert summary.output_tokens_per_s == pytest.approx(8 / run.duration_s)


def test_a_request_without_end_fails_at_its_timeout_counted_from_its_intended_start() -> None:
    target = PacedTarget(ttft_s=1000.0)
    run = driven(target, plan(0.0, 1.0), timeout_s=5.0)
    assert [answer.error for answer in run.answers] == ["no end within 5 s"] * 2
    assert [answer.e2e_s for answer in run.answers] == pytest.approx([5.0, 5.0])
    assert target.cancelled == [0, 1]


def test_a_timeout_in_the_middle_of_an_answer_leaves_its_latencies_out() -> None:
    run = driven(PacedTarget(ttft_s=1.0, gap_s=3.0), plan(0.0), timeout_s=5.0)
    assert len(run.answers[0].delivery_times_s) == 2
    assert summarize(run, Slo()).latencies.ttft.count == 0


class SilentTarget(PacedTarget):
    async def ask(self, answer: Answer, run: int) -> None:
        await asyncio.sleep(0.1)


def test_an_answer_without_a_token_is_a_failure() -> None:
    run = driven(SilentTarget(), plan(0.0))
    assert run.answers[0].error == "the answer held no token"


def test_a_run_that_is_watched_can_be_ended_and_leaves_nothing_running() -> None:
    target = PacedTarget(ttft_s=1.0, gap_s=1.0)

    def watch(answers: list[Answer]) -> str | None:
        return "enough" if any(answer.is_complete for answer in answers) else None

    run = run_virtually(drive(target, plan(0.0, 3.0, 50.0), run_number=0, timeout_s=100.0, watch=watch))
    assert run.abandoned == "enough"
    assert target.cancelled == [1]
    assert [answer.sent_s is None for answer in run.answers] == [False, False, True]
    summary = summarize(run, Slo())
    assert (summary.num_complete, summary.num_failed, summary.num_unfinished) == (1, 0, 2)


class BrokenTarget(PacedTarget):
    async def ask(self, answer: Answer, run: int) -> None:
        raise KeyError("a fault of the benchmark itself")


def test_a_fault_of_the_benchmark_itself_is_no_failed_request() -> None:
    with pytest.raises(ExceptionGroup) as raised:
        driven(BrokenTarget(), plan(0.0))
    assert raised.group_contains(KeyError)
