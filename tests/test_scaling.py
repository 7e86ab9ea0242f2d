"""How many workers the work needs: up and down with it, without going back and forth."""

from types import SimpleNamespace
from typing import Any

import pytest

from deployments.scaling import DOWN_SHARE, UP_SHARE, TokenWorkPolicy, WorkerReport, reports_of, wanted_workers
from deployments.scaling_report import ScalingReport
from monitoring.metrics_store import check_shape

TARGET_QUEUE_S = 2.0


def slots(held: float, of: float = 10.0) -> WorkerReport:
    return WorkerReport(num_held_requests=held, max_num_seqs=of)


def prompts(*, queued: float = 0.0, arriving: float = 0.0, rate: float = 1000.0) -> WorkerReport:
    return WorkerReport(queued, rate, arriving, 0.0, 10.0)


def wanted(*reports: WorkerReport) -> int:
    return wanted_workers(list(reports), len(reports), TARGET_QUEUE_S)


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([slots(0)], 1),
        ([slots(8)], 1),
        ([slots(9)], 2),
        ([slots(10), slots(10)], 3),
        ([slots(40)], 5),
        ([slots(0), slots(0), slots(0)], 1),
    ],
)
def test_sequence_slots_that_requests_hold_or_want_are_one_measure(reports: list[WorkerReport], expected: int) -> None:
    assert wanted(*reports) == expected


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        # Nothing waits, and half of the time is idle.
        ([prompts(arriving=500)], 1),
        # Nothing waits yet, but hardly any time is left.
        ([prompts(arriving=900)], 2),
        # Eight seconds of queue are four workers' to empty in two.
        ([prompts(queued=8000)], 5),
        # A slow worker has more to do with the same queue.
        ([prompts(queued=8000, rate=500)], 10),
        ([prompts(queued=1000, arriving=1000)], 2),
    ],
)
def test_prompt_tokens_against_the_measured_rate_are_the_other(reports: list[WorkerReport], expected: int) -> None:
    assert wanted(*reports) == expected


def test_the_greater_of_the_two_decides() -> None:
    both = WorkerReport(8000.0, 1000.0, 0.0, 9.0, 10.0)
    assert wanted(both) == wanted(prompts(queued=8000)) == 5
    assert wanted(WorkerReport(0.0, 1000.0, 100.0, 19.0, 10.0)) == wanted(slots(19)) == 3


def test_a_worker_is_given_up_only_where_the_others_stay_well_below_the_limit() -> None:
    """Two workers at 60% each would be one at 120%; at 45% the one would be at 90%; at 24%, 48%."""
    assert wanted(slots(6), slots(6)) == 2
    assert wanted(slots(4.5), slots(4.5)) == 2
    assert wanted(slots(2.4), slots(2.4)) == 1


def test_a_steady_load_never_makes_the_number_swing() -> None:
    for num_held in range(100):
        for num_workers in range(1, 12):
            number = num_workers
            seen = []
            for _ in range(6):
                number = wanted_workers([slots(num_held / number)] * number, number, TARGET_QUEUE_S)
                seen.append(number)
            assert len(set(seen[1:])) == 1, (num_held, num_workers, seen)
            share = num_held / 10 / number
            assert share <= UP_SHARE + 1e-6
            assert number == 1 or num_held / 10 / (number - 1) > DOWN_SHARE - 1e-6


def test_a_worker_whose_rate_was_never_measured_counts_by_its_slots_alone() -> None:
    assert wanted(WorkerReport(num_queued_tokens=5000.0, num_held_requests=1.0, max_num_seqs=10.0)) == 1


class FakeActor:
    """Keeps what it is told; `push.remote` as Ray's handles have it."""

    def __init__(self) -> None:
        self.pushed: list[tuple[str, dict[str, Any]]] = []

    @property
    def push(self) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda source, epoch, snapshot: self.pushed.append((source, snapshot)))


def context(metrics: dict[str, dict[Any, float]] | None, target: int) -> Any:
    return SimpleNamespace(
        aggregated_metrics=metrics,
        target_num_replicas=target,
        current_num_replicas=1,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=8,
        app_name="app",
        deployment_name="Worker",
    )


def test_the_policy_reads_what_replicas_reported_and_keeps_the_number_while_nobody_did() -> None:
    policy = TokenWorkPolicy(TARGET_QUEUE_S, ScalingReport(lambda app_name: FakeActor()))
    assert policy(context(None, 3)) == (3, {})
    assert policy(context({}, 3)) == (3, {})
    stats = prompts(queued=8000).as_stats()
    metrics = {name: {"a": value} for name, value in stats.items()}
    assert policy(context(metrics, 1)) == (5, {})
    # A second replica that has reported in part only.
    metrics["num_held_requests"]["b"] = 3.0
    assert sorted(reports_of(metrics), key=lambda report: report.num_held_requests)[1].num_held_requests == 3.0
    assert policy(context(metrics, 2)) == (5, {})


def test_what_the_autoscaler_chose_and_what_from_is_told_once_a_second() -> None:
    now_s = 0.0
    actor = FakeActor()
    report = ScalingReport(lambda app_name: {"app": actor}[app_name], lambda: now_s)
    policy = TokenWorkPolicy(TARGET_QUEUE_S, report)
    stats = WorkerReport(8000.0, 1000.0, 0.0, 3.0, 10.0).as_stats()
    for _ in range(15):
        policy(context({name: {"a": value} for name, value in stats.items()}, 2))
        report.wait()
        now_s += 0.1
    assert len(actor.pushed) == 2
    source, snapshot = actor.pushed[-1]
    assert (source, snapshot["labels"]) == ("autoscaler", {"deployment": "Worker"})
    assert snapshot["gauges"] == {
        "stallfree_scaling_workers": {
            "wanted": 5.0,
            "asked": 2.0,
            "running": 1.0,
            "reported": 1.0,
            "fewest": 1.0,
            "most": 8.0,
        },
        "stallfree_scaling_seen_demand": {"tokens": 4.0, "sequences": 0.3},
    }
    check_shape(snapshot)  # type: ignore[arg-type]


def test_scaling_goes_on_while_nobody_takes_its_reports(caplog: pytest.LogCaptureFixture) -> None:
    def gone(app_name: str) -> Any:
        raise ValueError(f"no actor of {app_name}")

    report = ScalingReport(gone)
    policy = TokenWorkPolicy(TARGET_QUEUE_S, report)
    assert policy(context({name: {"a": value} for name, value in slots(9).as_stats().items()}, 1)) == (2, {})
    report.wait()
    assert "not delivered" in caplog.text


def test_stats_are_plain_numbers_as_serve_wants_them() -> None:
    assert all(type(value) is float for value in WorkerReport(5, 1, 2, 3, 4).as_stats().values())
