"""What the dashboard is told of steps and workers."""

import pytest

from monitoring.dashboard_data import now_view
from monitoring.ingress_metrics import IngressMetrics
from monitoring.metrics_store import SILENT_AFTER_S, MetricsStore
from monitoring.step_feed import FIELDS, MAX_CHUNKS, MAX_STEPS, MAX_WORKERS, Row, StepFeed, rows_of
from monitoring.worker_metrics import WorkerMetrics
from scheduler.records import ChunkRecord, StepRecord, WaitReason


def record(step_id: int, *, duration_s: float | None = 0.5) -> StepRecord:
    return StepRecord(
        step_id,
        time_s=10.0,
        max_num_batched_tokens=64,
        num_prefill_tokens=3 * 20,
        num_decodes=2,
        prefill_chunks=[ChunkRecord(f"r{place}", place, 5, 25) for place in range(20)],
        num_waiting=4,
        waiting_reason=WaitReason.BLOCKS,
        duration_s=duration_s,
    )


def values_of(row: Row) -> dict[str, object]:
    return dict(zip(FIELDS, row, strict=True))


def test_a_row_says_how_long_ago_its_step_ended_and_names_some_of_its_chunks():
    [row] = rows_of([record(7), record(8, duration_s=None)], now_s=12.0)
    values = values_of(row)
    assert (values["step_id"], values["ended_ms"], values["duration_ms"]) == (7, 1500.0, 500.0)
    assert (values["num_decodes"], values["num_prefill_tokens"], values["budget"]) == (2, 60, 64)
    assert (values["num_waiting"], values["waiting_reason"]) == (4, "blocks")
    assert values["chunks"] == [[f"r{place}", 20] for place in range(MAX_CHUNKS)]


def test_times_are_on_the_clock_of_whoever_keeps_the_rows():
    feed = StepFeed()
    feed.add("0", rows_of([record(7)], now_s=12.0), now_ms=100_000.0)
    [row] = feed.since(0, "")["rows"]["0"]
    assert values_of(row)["ended_ms"] == 98_500.0


def test_each_question_gets_what_is_new_and_a_lost_store_gives_everything():
    feed = StepFeed()
    feed.add("0", rows_of([record(1), record(2)], 12.0), 0.0)
    first = feed.since(0, "")
    feed.add("1", rows_of([record(1)], 12.0), 0.0)
    feed.add("0", rows_of([record(3)], 12.0), 0.0)
    second = feed.since(first["cursor"], first["store_id"])
    assert {worker: [row[0] for row in rows] for worker, rows in second["rows"].items()} == {"0": [3], "1": [1]}
    assert feed.since(second["cursor"], second["store_id"])["rows"] == {}
    everything = feed.since(second["cursor"], "another store's")["rows"]
    assert {worker: [row[0] for row in rows] for worker, rows in everything.items()} == {"0": [1, 2, 3], "1": [1]}


def test_steps_and_workers_that_are_kept_are_bounded():
    feed = StepFeed()
    feed.add("0", rows_of([record(step_id) for step_id in range(MAX_STEPS + 5)], 12.0), 0.0)
    rows = feed.since(0, "")["rows"]["0"]
    assert (len(rows), rows[0][0], rows[-1][0]) == (MAX_STEPS, 5, MAX_STEPS + 4)
    for worker in range(1, MAX_WORKERS):
        feed.add(str(worker), rows_of([record(1)], 12.0), 0.0)
    feed.add("0", rows_of([record(MAX_STEPS + 5)], 12.0), 0.0)
    feed.add("new", rows_of([record(1)], 12.0), 0.0)
    kept = feed.since(0, "")["rows"]
    assert len(kept) == MAX_WORKERS
    assert "1" not in kept
    assert {"0", "new"} <= kept.keys()


def test_a_window_has_the_steps_that_ended_in_it():
    feed = StepFeed()
    feed.add("0", rows_of([record(1)], now_s=20.0), now_ms=50_000.0)
    feed.add("0", rows_of([record(2)], now_s=12.0), now_ms=50_000.0)
    assert {worker: [row[0] for row in rows] for worker, rows in feed.ended_since(48_500.0).items()} == {"0": [2]}


def test_rows_of_another_version_are_refused():
    with pytest.raises(ValueError, match="another version"):
        StepFeed().add("0", [[1, 2.0]], 0.0)


def test_workers_are_shown_as_they_are_now_with_totals_of_all_ingress_replicas():
    now_s = 0.0
    store = MetricsStore(lambda: now_s)
    for rank in (1, 0, 2):
        metrics = WorkerMetrics("demo", rank)
        metrics.set_pool_sizes(num_device_blocks=100, num_host_blocks=10)
        store.push(f"worker-{rank}", "a", metrics.snapshot())
    for replica in ("x", "y"):
        ingress = IngressMetrics("demo")
        ingress.request_finished("stop", 5, 0.1)
        store.push(f"ingress-{replica}", "a", ingress.snapshot())
    store.drop("worker-2")
    view = now_view(store)
    assert [(worker["worker"], worker["is_up"]) for worker in view["workers"]] == [("0", True), ("1", True)]
    assert view["workers"][0]["values"]["num_blocks"] == 100
    assert (view["totals"]["requests"], view["totals"]["prompt_tokens"]) == (2, 10)
    now_s = SILENT_AFTER_S + 1
    assert [(worker["is_up"], worker["values"]) for worker in now_view(store)["workers"]] == [(False, {})] * 2


def test_no_step_begins_before_the_last_one_ended_though_a_report_was_faster_than_the_one_before():
    feed = StepFeed()
    first = StepRecord(1, time_s=9.0, max_num_batched_tokens=8, duration_s=1.0)
    second = StepRecord(2, time_s=10.0, max_num_batched_tokens=8, duration_s=1.0)
    third = StepRecord(3, time_s=11.0, max_num_batched_tokens=8, duration_s=1.0)
    feed.add("0", rows_of([first], now_s=12.0), now_ms=50_000.0)
    feed.add("0", rows_of([second, third], now_s=12.0), now_ms=49_900.0)
    rows = feed.since(0, "")["rows"]["0"]
    spans = [(row[1] - row[2], row[1]) for row in rows]
    assert spans == [(47_000.0, 48_000.0), (48_000.0, 49_000.0), (49_000.0, 50_000.0)]
