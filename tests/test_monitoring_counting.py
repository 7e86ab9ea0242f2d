"""Counting in one process: the table, the accumulator, and what workers and ingress replicas make of events."""

import re
import timeit
from bisect import bisect_left

import pytest

from monitoring.accumulator import Accumulator
from monitoring.ingress_metrics import IngressMetrics
from monitoring.metric import PHASES
from monitoring.table import INGRESS, METRICS, SCALER, WORKER, MetricKind
from monitoring.worker_metrics import WorkerMetrics
from scheduler.records import ChunkRecord, PreemptionRecord, StepRecord, WaitReason


def make_step(step_id: int, *, duration_s: float | None = 0.02, chunks: tuple[int, ...] = ()) -> StepRecord:
    return StepRecord(
        step_id=step_id,
        time_s=float(step_id),
        max_num_batched_tokens=256,
        num_batched_tokens=sum(chunks) + 3,
        num_prefill_tokens=sum(chunks),
        num_decodes=3,
        prefill_chunks=[ChunkRecord("a", index, 0, size) for index, size in enumerate(chunks)],
        duration_s=duration_s,
    )


def preemption(mode: str, reason: str, *, num_discarded_tokens: int = 0) -> PreemptionRecord:
    return PreemptionRecord("b", mode, reason, "a", 4, num_discarded_tokens, 0.0, 0.0)


def num_observed(snapshot: dict, name: str) -> int:
    return sum(snapshot["histograms"][name]["counts"])


def test_counters_end_in_total_and_nothing_else_does() -> None:
    for metric in METRICS.values():
        assert metric.name.endswith("_total") == (metric.kind is MetricKind.COUNTER), metric.name
        assert metric.name.endswith("_info") == (metric.kind is MetricKind.INFO), metric.name
        assert re.fullmatch(r"stallfree_[a-z0-9_]+", metric.name)


def test_preemptions_are_a_counter() -> None:
    assert METRICS["stallfree_preemptions_total"].kind is MetricKind.COUNTER


def test_only_histograms_have_buckets_and_they_ascend() -> None:
    for metric in METRICS.values():
        assert bool(metric.buckets) == (metric.kind is MetricKind.HISTOGRAM)
        assert list(metric.buckets) == sorted(set(metric.buckets))


def test_only_models_ranks_and_deployments_tell_sources_apart_and_every_other_label_is_closed() -> None:
    for metric in METRICS.values():
        assert metric.identity in (INGRESS, WORKER, SCALER)
        assert (metric.label is None) == (metric.label_values == ("",))


def test_one_source_makes_a_bounded_number_of_series() -> None:
    for identity in (INGRESS, WORKER, SCALER):
        num_series = sum(
            len(metric.buckets) + 3 if metric.buckets else len(metric.label_values)
            for metric in METRICS.values()
            if metric.identity == identity
        )
        assert num_series < 250


def test_closed_label_sets_start_at_zero() -> None:
    worker = WorkerMetrics("demo", 0).snapshot()
    assert worker["counters"]["stallfree_preemptions_total"] == {"recompute": 0, "swap": 0}
    assert worker["counters"]["stallfree_swapped_blocks_total"] == {"in": 0, "out": 0}
    assert worker["gauges"]["stallfree_kv_blocks_used"] == {"device": 0, "host": 0}
    ingress = IngressMetrics("demo").snapshot()
    assert ingress["counters"]["stallfree_requests_total"] == dict.fromkeys(("stop", "length", "abort", "error"), 0)
    assert num_observed(ingress, "stallfree_time_to_first_token_seconds") == 0


def test_unknown_metrics_and_label_values_are_refused() -> None:
    accumulator = Accumulator({"model": "demo", "worker": "0"})
    with pytest.raises(KeyError):
        accumulator.inc("stallfree_surprises_total")
    with pytest.raises(KeyError):
        accumulator.inc("stallfree_preemptions_total", 1, "by magic")
    with pytest.raises(KeyError):
        accumulator.set("stallfree_kv_blocks_used", 1, "tape")
    with pytest.raises(KeyError):
        accumulator.observe("stallfree_inter_token_latency_seconds", 1.0)  # the ingress's, not a worker's
    with pytest.raises(AssertionError):
        Accumulator({"model": "demo", "user": "someone"})


def test_a_client_cannot_bring_a_value_into_a_label() -> None:
    with pytest.raises(KeyError):
        IngressMetrics("demo").request_finished('stop",user="mallory', 1, 1.0)


def test_only_declared_tenants_have_series_of_their_own_and_all_others_share_one() -> None:
    metrics = IngressMetrics("demo", ("team-a", "team-b"))
    for tenant, num_tokens in (("team-a", 3), ("mallory", 5), ("", 7)):
        metrics.tokens_delivered(num_tokens, tenant)
        metrics.request_finished("stop", 10 * num_tokens, 1.0, tenant)
    metrics.request_rejected("queue_full", "team-b")
    counters = metrics.snapshot()["counters"]
    assert counters["stallfree_tenant_generation_tokens_total"] == {"team-a": 3, "team-b": 0, "other": 12}
    assert counters["stallfree_tenant_prompt_tokens_total"] == {"team-a": 30, "team-b": 0, "other": 120}
    assert counters["stallfree_tenant_requests_total"] == {"team-a": 1, "team-b": 0, "other": 2}
    assert counters["stallfree_tenant_rejections_total"] == {"team-a": 0, "team-b": 1, "other": 0}


def test_a_counter_never_goes_down() -> None:
    with pytest.raises(AssertionError):
        Accumulator({"model": "demo"}).inc("stallfree_generation_tokens_total", -1)


def test_an_observation_on_a_bound_falls_into_that_bounds_bucket() -> None:
    accumulator = Accumulator({"model": "demo", "worker": "0"})
    bounds = METRICS["stallfree_step_tokens"].buckets
    for value in (256.0, 257.0, bounds[-1] + 1):
        accumulator.observe("stallfree_step_tokens", value)
    counts = accumulator.snapshot()["histograms"]["stallfree_step_tokens"]["counts"]
    assert counts[bounds.index(256.0)] == 1
    assert counts[bounds.index(512.0)] == 1
    assert counts[-1] == 1
    assert sum(counts) == 3


def test_a_snapshot_does_not_change_when_counting_goes_on() -> None:
    metrics = IngressMetrics("demo")
    before = metrics.snapshot()
    metrics.tokens_delivered(5)
    metrics.first_token(0.1)
    assert before == IngressMetrics("demo").snapshot()


def test_first_token_times_fall_into_the_bucket_of_their_size_and_not_into_the_smallest() -> None:
    metrics = IngressMetrics("demo")
    bounds = METRICS["stallfree_time_to_first_token_seconds"].buckets
    times_s = [0.03, 0.2, 1.2, 7.0]
    for ttft_s in times_s:
        metrics.first_token(ttft_s)
    totals = metrics.snapshot()["histograms"]["stallfree_time_to_first_token_seconds"]
    assert [index for index, count in enumerate(totals["counts"]) if count] == [
        bisect_left(bounds, ttft_s) for ttft_s in times_s
    ]
    assert totals["counts"][0] == 0
    assert totals["sum"] == pytest.approx(sum(times_s))


def test_prompt_tokens_are_the_sum_of_what_usage_reports() -> None:
    metrics = IngressMetrics("demo")
    for reason, prompt_tokens in (("stop", 12), ("length", 30), ("abort", 5), ("error", 0)):
        metrics.request_finished(reason, prompt_tokens, 2.0)
    snapshot = metrics.snapshot()
    assert snapshot["counters"]["stallfree_prompt_tokens_total"] == {"": 47}
    assert snapshot["counters"]["stallfree_requests_total"] == {"stop": 1, "length": 1, "abort": 1, "error": 1}


def test_only_whole_answers_enter_the_end_to_end_latency() -> None:
    metrics = IngressMetrics("demo")
    for reason in ("stop", "length", "abort", "error"):
        metrics.request_finished(reason, 1, 2.0)
    assert num_observed(metrics.snapshot(), "stallfree_e2e_request_latency_seconds") == 2


def test_chunk_counts_equal_the_chunks_scheduled() -> None:
    metrics = WorkerMetrics("demo", 0)
    metrics.fold([make_step(0, chunks=(64, 32)), make_step(1, chunks=(16,)), make_step(2)])
    snapshot = metrics.snapshot()
    assert num_observed(snapshot, "stallfree_prefill_chunk_tokens") == 3
    assert snapshot["histograms"]["stallfree_prefill_chunk_tokens"]["sum"] == 112
    assert num_observed(snapshot, "stallfree_step_tokens") == 3
    assert snapshot["histograms"]["stallfree_step_tokens"]["sum"] == 112 + 9
    assert snapshot["histograms"]["stallfree_step_seconds"]["sum"] == pytest.approx(0.06)


def test_preemptions_and_swaps_are_counted_by_mode_and_direction() -> None:
    step = make_step(7)
    step.preemptions = [
        preemption("recompute", "blocks", num_discarded_tokens=60),
        preemption("swap", "priority"),
        preemption("recompute", "host_pool_full", num_discarded_tokens=9),
    ]
    step.num_blocks_swapped_out, step.num_blocks_swapped_in = 2, 5
    metrics = WorkerMetrics("demo", 0)
    metrics.fold([step])
    counters = metrics.snapshot()["counters"]
    assert counters["stallfree_preemptions_total"] == {"recompute": 2, "swap": 1}
    assert counters["stallfree_preemption_reasons_total"] == {"blocks": 1, "priority": 1, "host_pool_full": 1}
    assert counters["stallfree_discarded_tokens_total"] == {"": 69}
    assert counters["stallfree_swapped_blocks_total"] == {"in": 5, "out": 2}


def test_swapped_blocks_are_counted_in_bytes_and_steps_waits_for_them_in_seconds() -> None:
    metrics = WorkerMetrics("demo", 0, block_bytes=1000)
    for step_id, (out, into, swap_s) in enumerate([(3, 0, 0.25), (0, 2, 0.5), (0, 0, 0.0)]):
        step = make_step(step_id)
        step.num_blocks_swapped_out, step.num_blocks_swapped_in, step.swap_s = out, into, swap_s
        metrics.fold([step])
    counters = metrics.snapshot()["counters"]
    assert counters["stallfree_swap_bytes_total"] == {"in": 2000, "out": 3000}
    assert counters["stallfree_swap_seconds_total"] == {"": 0.75}


def test_steps_are_counted_by_what_they_ran() -> None:
    metrics = WorkerMetrics("demo", 0)
    alone = make_step(2, duration_s=0.3, chunks=(8,))
    alone.num_batched_tokens, alone.num_decodes = 8, 0
    nothing = StepRecord(step_id=3, time_s=0.0, max_num_batched_tokens=256, duration_s=0.0)
    metrics.fold([make_step(0, duration_s=0.1), make_step(1, duration_s=0.2, chunks=(8,)), alone, nothing])
    counters = metrics.snapshot()["counters"]
    assert counters["stallfree_steps_total"] == {"decode": 1, "mixed": 1, "prefill": 1, "none": 1}
    seconds = counters["stallfree_step_kind_seconds_total"]
    assert seconds == {"decode": 0.1, "mixed": 0.2, "prefill": 0.3, "none": 0.0}


def test_what_the_budget_allowed_and_what_was_scheduled_of_it_are_counted() -> None:
    metrics = WorkerMetrics("demo", 0)
    metrics.fold([make_step(0, chunks=(64, 32)), make_step(1)])
    counters = metrics.snapshot()["counters"]
    assert counters["stallfree_budget_tokens_total"] == {"": 512}
    assert counters["stallfree_scheduled_tokens_total"] == {"prefill": 96, "decode": 6}


def test_chunks_that_leave_a_part_of_their_prompt_are_counted() -> None:
    metrics = WorkerMetrics("demo", 0)
    step = make_step(0, chunks=(64, 32))
    step.prefill_chunks[1].completes = True
    metrics.fold([step])
    assert metrics.snapshot()["counters"]["stallfree_partial_prefill_chunks_total"] == {"": 1}


def test_steps_in_which_somebody_had_to_wait_are_counted_by_the_reason() -> None:
    metrics = WorkerMetrics("demo", 0)
    for step_id, reason in enumerate([WaitReason.TOKEN_BUDGET, WaitReason.TOKEN_BUDGET, None]):
        step = make_step(step_id)
        step.waiting_reason, step.swapped_reason = reason, WaitReason.BLOCKS
        metrics.fold([step])
    counters = metrics.snapshot()["counters"]
    waiting, swapped = counters["stallfree_blocked_steps_total"], counters["stallfree_blocked_swapped_steps_total"]
    assert set(waiting) == set(swapped) == {reason.value for reason in WaitReason}
    assert {reason: count for reason, count in waiting.items() if count} == {"token_budget": 2}
    assert {reason: count for reason, count in swapped.items() if count} == {"blocks": 3}


def test_the_governors_state_is_that_of_the_newest_step_that_ran() -> None:
    metrics = WorkerMetrics("demo", 0)
    governed, moved = make_step(0), make_step(1, duration_s=None)
    governed.governor_margin, governed.max_num_batched_tokens = 1.3, 48
    metrics.fold([governed, moved, make_step(2, duration_s=None)])
    assert metrics.snapshot()["gauges"]["stallfree_governor_margin"] == {"": 1.3}


def test_an_info_is_told_whole_or_not_at_all() -> None:
    metrics = IngressMetrics("demo")
    assert metrics.snapshot()["infos"] == {"stallfree_build_info": {}}
    metrics.build(version="1", python="2", ray="3")
    assert metrics.snapshot()["infos"] == {"stallfree_build_info": {"version": "1", "python": "2", "ray": "3"}}
    with pytest.raises(KeyError):
        WorkerMetrics("demo", 0).tell({"version": "1"})


def test_sizes_are_those_of_every_request_and_times_for_each_token_of_whole_ones() -> None:
    metrics = IngressMetrics("demo")
    metrics.request_sizes(100, 20, 0.03)
    metrics.request_sizes(7, 0, None)
    snapshot = metrics.snapshot()
    assert snapshot["histograms"]["stallfree_request_prompt_tokens"]["sum"] == 107
    assert num_observed(snapshot, "stallfree_request_generation_tokens") == 2
    assert num_observed(snapshot, "stallfree_request_time_per_output_token_seconds") == 1


def test_blocks_looked_for_and_found_in_the_prefix_cache_are_counted() -> None:
    metrics = WorkerMetrics("demo", 0, block_size=16)
    for step_id, (num_queried, num_hit) in enumerate([(6, 0), (0, 0), (6, 5)]):
        step = make_step(step_id)
        step.num_blocks_queried, step.num_blocks_hit = num_queried, num_hit
        metrics.fold([step])
    counters = metrics.snapshot()["counters"]
    assert counters["stallfree_prefix_cache_queries_total"] == {"": 12}
    assert counters["stallfree_prefix_cache_hits_total"] == {"": 5}
    assert counters["stallfree_prefix_cache_query_tokens_total"] == {"": 192}
    assert counters["stallfree_prefix_cache_hit_tokens_total"] == {"": 80}


def test_a_step_is_counted_once_though_lists_of_records_overlap() -> None:
    metrics = WorkerMetrics("demo", 0)
    records = [make_step(step_id, chunks=(8,)) for step_id in range(4)]
    metrics.fold(records[:3])
    metrics.fold(records)
    metrics.fold([])
    assert num_observed(metrics.snapshot(), "stallfree_prefill_chunk_tokens") == 4
    assert metrics.last_step_id == 3


def test_a_step_still_running_is_counted_when_it_has_ended() -> None:
    metrics = WorkerMetrics("demo", 0)
    running = make_step(1, duration_s=None, chunks=(8,))
    metrics.fold([make_step(0), running])
    assert metrics.last_step_id == 0
    running.duration_s = 0.5
    metrics.fold([running])
    snapshot = metrics.snapshot()
    assert num_observed(snapshot, "stallfree_step_seconds") == 2
    assert num_observed(snapshot, "stallfree_prefill_chunk_tokens") == 1


def test_a_step_that_only_moved_blocks_is_counted_without_a_duration() -> None:
    metrics = WorkerMetrics("demo", 0)
    moved = make_step(1, duration_s=None)
    moved.num_blocks_swapped_out = 6
    metrics.fold([moved, make_step(2)])
    snapshot = metrics.snapshot()
    assert snapshot["counters"]["stallfree_swapped_blocks_total"]["out"] == 6
    assert num_observed(snapshot, "stallfree_step_seconds") == 1


def test_what_swapping_reached_at_start_shows_each_way_by_itself() -> None:
    metrics = WorkerMetrics("demo", 0)
    metrics.set_swap_bandwidth(out_bytes_per_s=25.4e9, in_bytes_per_s=0.0)
    assert metrics.snapshot()["gauges"]["stallfree_swap_bytes_per_second"] == {"out": 25_400_000_000, "in": 0}


def test_gauges_are_those_of_now_after_everything_was_cancelled_without_another_step() -> None:
    metrics = WorkerMetrics("demo", 0)
    metrics.set_pool_sizes(num_device_blocks=64, num_host_blocks=16)
    metrics.set_load(
        num_waiting=3,
        num_running=2,
        num_swapped=1,
        num_used_device_blocks=50,
        num_used_host_blocks=4,
        num_cached_device_blocks=7,
    )
    gauges = metrics.snapshot()["gauges"]
    assert gauges["stallfree_num_requests_waiting"] == {"": 3}
    assert gauges["stallfree_num_requests_running"] == {"": 2}
    assert gauges["stallfree_num_requests_swapped"] == {"": 1}
    assert gauges["stallfree_kv_blocks_used"] == {"device": 50, "host": 4}
    assert gauges["stallfree_kv_blocks_cached"] == {"": 7}
    assert gauges["stallfree_kv_blocks"] == {"device": 64, "host": 16}
    metrics.set_load(
        num_waiting=0,
        num_running=0,
        num_swapped=0,
        num_used_device_blocks=0,
        num_used_host_blocks=0,
        num_cached_device_blocks=0,
    )
    idle = metrics.snapshot()["gauges"]
    assert idle.pop("stallfree_kv_blocks") == {"device": 64, "host": 16}
    assert all(number == 0 for series in idle.values() for number in series.values())


def test_observing_takes_microseconds() -> None:
    accumulator = Accumulator({"model": "demo"})
    seconds = min(
        timeit.repeat(
            lambda: accumulator.observe("stallfree_inter_token_latency_seconds", 0.04), number=2000, repeat=10
        )
    )
    assert seconds / 2000 < 10e-6  # about 0.4 µs on an idle machine; the margin is for a crowded one


def test_a_demand_that_fades_reaches_zero() -> None:
    worker = WorkerMetrics("demo", 0)
    seen = []
    for halvings in range(12):
        worker.set_demand(tokens=0.5**halvings, sequences=0.0)
        seen.append(worker.snapshot()["gauges"]["stallfree_scaling_demand"]["tokens"])
    assert seen[:3] == [1.0, 0.5, 0.25]
    assert seen[-1] == 0.0


def test_a_requests_time_is_counted_by_phase() -> None:
    metrics = IngressMetrics("demo")
    parts = [("queue", 0.5), ("queue", 0.25), ("prefill", 1.0), ("swapped", 2.0), ("preempted", 1.0), ("deliver", 9.0)]
    metrics.request_phases(parts)
    histograms = metrics.snapshot()["histograms"]
    sums = {phase: histograms[f"stallfree_request_{phase}_seconds"]["sum"] for phase in PHASES}
    assert sums == {"queue": 0.75, "prefill": 1.0, "interference": 0.0, "decode": 0.0, "preempted": 3.0}
    assert all(num_observed(metrics.snapshot(), f"stallfree_request_{phase}_seconds") == 1 for phase in PHASES)
