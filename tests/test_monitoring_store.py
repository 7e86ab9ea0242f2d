"""The metrics store and its text: many processes, deaths, restarts, and what a scrape shows."""

import math
import random
import subprocess
import timeit

import pytest
from prometheus_client.parser import text_string_to_metric_families

from monitoring.accumulator import Snapshot
from monitoring.exposition import StoreCollector, registry_of, render
from monitoring.ingress_metrics import IngressMetrics
from monitoring.metrics_store import MAX_DEAD_REPORTS, MAX_LABEL_SETS, SILENT_AFTER_S, MetricsStore
from monitoring.table import METRICS
from monitoring.worker_metrics import WorkerMetrics
from scheduler.records import ChunkRecord, PreemptionRecord, StepRecord
from tests.debian_tools import program


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(clock: FakeClock) -> MetricsStore:
    return MetricsStore(clock)


def scrape(store: MetricsStore) -> dict[str, float]:
    """Every sample of the scraped text by its series, for example `stallfree_worker_up{model="demo",worker="0"}`."""
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(render(registry_of(StoreCollector(store)))):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            series = f"{sample.name}{{{labels}}}"
            assert series not in samples, f"{series} is there twice"
            samples[series] = sample.value
    return samples


def ingress_snapshot(num_answers: int, *, model: str = "demo") -> Snapshot:
    metrics = IngressMetrics(model)
    for _ in range(num_answers):
        metrics.first_token(0.2)
        metrics.tokens_delivered(10)
        metrics.request_finished("stop", 5, 1.0)
    return metrics.snapshot()


def worker_snapshot(num_preemptions: int, *, worker: int = 0, num_running: int = 0) -> Snapshot:
    metrics = WorkerMetrics("demo", worker)
    step = StepRecord(step_id=1, time_s=0.0, max_num_batched_tokens=64, num_batched_tokens=40, duration_s=0.01)
    step.prefill_chunks = [ChunkRecord("a", 0, 0, 40)]
    step.preemptions = [PreemptionRecord("a", "recompute", "blocks", "b", 1, 16, 0.0, 0.0)] * num_preemptions
    metrics.fold([step])
    metrics.set_load(
        num_waiting=0,
        num_running=num_running,
        num_swapped=0,
        num_used_device_blocks=13,
        num_used_host_blocks=0,
        num_cached_device_blocks=0,
    )
    return metrics.snapshot()


STOPPED = 'stallfree_requests_total{finish_reason="stop",model="demo"}'
PREEMPTED = 'stallfree_preemptions_total{mode="recompute",model="demo",worker="0"}'
RUNNING = 'stallfree_num_requests_running{model="demo",worker="0"}'
UP = 'stallfree_worker_up{model="demo",worker="0"}'


def test_two_ingress_replicas_are_summed_and_every_scrape_is_complete(store: MetricsStore) -> None:
    store.push("ingress-a", "1", ingress_snapshot(3))
    store.push("ingress-b", "1", ingress_snapshot(4))
    for _ in range(5):
        samples = scrape(store)
        assert samples[STOPPED] == 7
        assert samples['stallfree_generation_tokens_total{model="demo"}'] == 70
        assert samples['stallfree_time_to_first_token_seconds_count{model="demo"}'] == 7
        assert samples['stallfree_time_to_first_token_seconds_sum{model="demo"}'] == pytest.approx(1.4)


def test_two_workers_on_one_node_keep_their_own_series(store: MetricsStore) -> None:
    store.push("worker-0", "a", worker_snapshot(2, worker=0, num_running=1))
    store.push("worker-1", "b", worker_snapshot(5, worker=1, num_running=4))
    samples = scrape(store)
    assert samples[PREEMPTED] == 2
    assert samples[PREEMPTED.replace('worker="0"', 'worker="1"')] == 5
    assert samples[RUNNING] == 1
    assert samples[RUNNING.replace('worker="0"', 'worker="1"')] == 4


def test_a_newer_push_replaces_the_same_processes_older_one(store: MetricsStore) -> None:
    store.push("ingress-a", "1", ingress_snapshot(3))
    store.push("ingress-a", "1", ingress_snapshot(4))
    assert scrape(store)[STOPPED] == 4


def test_counters_go_on_where_the_dead_worker_of_the_same_rank_left_them(store: MetricsStore, clock: FakeClock) -> None:
    store.push("worker-0", "first life", worker_snapshot(5, num_running=3))
    clock.now += 4
    store.push("worker-0", "second life", worker_snapshot(0))
    assert scrape(store)[PREEMPTED] == 5
    store.push("worker-0", "second life", worker_snapshot(2))
    assert scrape(store)[PREEMPTED] == 7


def test_an_old_and_a_new_worker_of_one_rank_pushing_in_turns_count_once_each(
    store: MetricsStore, clock: FakeClock
) -> None:
    for _ in range(20):
        store.push("worker-0", "draining", worker_snapshot(5, num_running=2))
        store.push("worker-0", "replacement", worker_snapshot(1, num_running=1))
        clock.now += 1
    samples = scrape(store)
    assert samples[PREEMPTED] == 6
    assert samples[RUNNING] == 3


def test_a_process_taken_for_dead_that_pushes_again_is_not_counted_twice(store: MetricsStore, clock: FakeClock) -> None:
    store.push("worker-0", "a", worker_snapshot(5))
    clock.now += SILENT_AFTER_S * 3
    store.push("worker-0", "b", worker_snapshot(1))
    store.push("worker-0", "a", worker_snapshot(6))
    assert scrape(store)[PREEMPTED] == 7


def test_the_gauges_of_a_silent_worker_vanish_and_its_counters_stay(store: MetricsStore, clock: FakeClock) -> None:
    store.push("worker-0", "a", worker_snapshot(5, num_running=3))
    clock.now += SILENT_AFTER_S
    assert scrape(store)[UP] == 1
    clock.now += 0.1
    samples = scrape(store)
    assert RUNNING not in samples
    assert not [series for series in samples if series.startswith("stallfree_kv_blocks")]
    assert samples[PREEMPTED] == 5
    assert samples[UP] == 0


def test_a_worker_that_says_goodbye_is_neither_up_nor_down(store: MetricsStore) -> None:
    store.push("worker-0", "a", worker_snapshot(5, num_running=3))
    store.drop("worker-0", "a")
    samples = scrape(store)
    assert UP not in samples
    assert RUNNING not in samples
    assert samples[PREEMPTED] == 5


def test_the_goodbye_of_the_replaced_worker_leaves_its_replacement_up(store: MetricsStore, clock: FakeClock) -> None:
    store.push("worker-0", "old", worker_snapshot(5, num_running=3))
    clock.now += 1
    store.push("worker-0", "new", worker_snapshot(0, num_running=1))
    store.drop("worker-0", "old")
    samples = scrape(store)
    assert samples[UP] == 1
    assert samples[RUNNING] == 1


def test_an_unknown_source_may_be_dropped(store: MetricsStore) -> None:
    store.drop("nobody")
    assert UP not in scrape(store)


def test_a_rank_that_was_killed_and_replaced_is_up(store: MetricsStore, clock: FakeClock) -> None:
    store.push("worker-0", "killed", worker_snapshot(1))
    clock.now += SILENT_AFTER_S + 1
    assert scrape(store)[UP] == 0
    store.push("worker-0", "replacement", worker_snapshot(0))
    assert scrape(store)[UP] == 1


def test_hundreds_of_dead_ingress_replicas_are_kept_as_a_few_reports_with_all_their_counts(
    store: MetricsStore, clock: FakeClock
) -> None:
    for index in range(300):
        reply = store.push(f"ingress-{index}", "1", ingress_snapshot(2))
        clock.now += SILENT_AFTER_S + 1
    assert scrape(store)[STOPPED] == 600
    assert len(reply["dead"]) <= MAX_DEAD_REPORTS + 1


def test_label_sets_without_end_are_refused(store: MetricsStore) -> None:
    for index in range(MAX_LABEL_SETS):
        store.push("ingress", "1", ingress_snapshot(0, model=f"model-{index}"))
    with pytest.raises(ValueError, match="label sets"):
        store.push("ingress", "1", ingress_snapshot(0, model="one more"))
    store.push("ingress", "1", ingress_snapshot(1, model="model-0"))


def test_a_snapshot_of_another_metric_table_is_refused(store: MetricsStore) -> None:
    store.push("ingress", "1", ingress_snapshot(1))
    other_buckets = ingress_snapshot(2)
    other_buckets["histograms"]["stallfree_time_to_first_token_seconds"]["counts"].append(0)
    made_up_label = ingress_snapshot(2)
    made_up_label["counters"]["stallfree_requests_total"]["mallory"] = 1
    missing = ingress_snapshot(2)
    del missing["counters"]["stallfree_prompt_tokens_total"]
    other_info = ingress_snapshot(2)
    other_info["infos"]["stallfree_build_info"] = {"version": "1", "color": "red"}
    for snapshot in (other_buckets, made_up_label, missing, other_info):
        with pytest.raises(ValueError, match="another version"):
            store.push("ingress", "1", snapshot)
    assert scrape(store)[STOPPED] == 1


def test_counters_survive_a_restart_of_the_store_through_what_the_living_hand_back(clock: FakeClock) -> None:
    before = MetricsStore(clock)
    before.push("worker-0", "dead", worker_snapshot(5))
    clock.now += SILENT_AFTER_S + 1
    heritage = before.push("worker-0", "alive", worker_snapshot(2), None)
    assert scrape(before)[PREEMPTED] == 7

    after = MetricsStore(clock)
    heritage = after.push("worker-0", "alive", worker_snapshot(3), heritage)
    assert scrape(after)[PREEMPTED] == 8
    after.push("worker-0", "alive", worker_snapshot(3), heritage)
    assert scrape(after)[PREEMPTED] == 8
    assert scrape(after)[UP] == 1


def test_several_living_replicas_hand_back_the_same_dead_and_they_count_once(clock: FakeClock) -> None:
    before = MetricsStore(clock)
    for index in range(MAX_DEAD_REPORTS + 5):
        before.push(f"dead-{index}", "1", ingress_snapshot(1))
    clock.now += SILENT_AFTER_S + 1
    heritage_a = before.push("a", "1", ingress_snapshot(1))
    heritage_b = before.push("b", "1", ingress_snapshot(1))
    expected = scrape(before)[STOPPED]

    after = MetricsStore(clock)
    after.push("newcomer", "1", ingress_snapshot(0))
    after.push("a", "1", ingress_snapshot(1), heritage_a)
    after.push("b", "1", ingress_snapshot(1), heritage_b)
    assert scrape(after)[STOPPED] == expected == MAX_DEAD_REPORTS + 7


def test_counters_never_go_down_whoever_dies_pauses_or_comes_back(clock: FakeClock) -> None:
    """Random lives of three ranks, with pauses long enough to be taken for dead: every scrape shows the exact sum."""
    randomness = random.Random(7)
    store = MetricsStore(clock)
    epochs = [0, 0, 0]
    counts: dict[tuple[int, int], int] = {}
    for _ in range(400):
        clock.now += randomness.choice((0.5, 1.0, SILENT_AFTER_S + 1))
        worker = randomness.randrange(3)
        if randomness.random() < 0.1:
            epochs[worker] += 1
        life = (worker, epochs[worker])
        counts[life] = counts.get(life, 0) + randomness.randrange(3)
        store.push(f"worker-{worker}", f"life {epochs[worker]}", worker_snapshot(counts[life], worker=worker))
        samples = scrape(store)
        for rank in {rank for rank, _ in counts}:
            expected = sum(count for (of_rank, _), count in counts.items() if of_rank == rank)
            assert samples[PREEMPTED.replace('worker="0"', f'worker="{rank}"')] == expected


def test_tenants_of_another_configuration_keep_what_they_had(store: MetricsStore) -> None:
    for source, tenants in (("before", ("a", "b")), ("after", ("b", "c"))):
        metrics = IngressMetrics("demo", tenants)
        for tenant in ("a", "b", "c"):
            metrics.tokens_delivered(1, tenant)
        store.push(source, "1", metrics.snapshot())
    samples = scrape(store)
    name = "stallfree_tenant_generation_tokens_total"
    counted = {tenant: samples[f'{name}{{model="demo",tenant="{tenant}"}}'] for tenant in ("a", "b", "c", "other")}
    assert counted == {"a": 1, "b": 2, "c": 1, "other": 2}


def test_histograms_are_cumulative_and_end_with_the_count(store: MetricsStore) -> None:
    metrics = IngressMetrics("demo")
    for ttft_s in (0.001, 0.3, 0.3, 500.0):
        metrics.first_token(ttft_s)
    store.push("ingress", "1", metrics.snapshot())
    samples = scrape(store)
    name = "stallfree_time_to_first_token_seconds"
    bounds = [*METRICS[name].buckets, math.inf]
    counts = [samples[f'{name}_bucket{{le="{"+Inf" if b == math.inf else b}",model="demo"}}'] for b in bounds]
    assert counts == [sum(ttft_s <= bound for ttft_s in (0.001, 0.3, 0.3, 500.0)) for bound in bounds]
    assert samples[f'{name}_count{{model="demo"}}'] == 4


def test_a_model_name_with_quotes_and_newlines_is_escaped(store: MetricsStore) -> None:
    model = 'a"b\\c\nd'
    store.push("ingress", "1", ingress_snapshot(2, model=model))
    families = text_string_to_metric_families(render(registry_of(StoreCollector(store))))
    models = {sample.labels["model"] for family in families for sample in family.samples}
    assert models == {model}


def test_an_info_is_that_of_the_newest_living_process(store: MetricsStore, clock: FakeClock) -> None:
    old, new = IngressMetrics("demo"), IngressMetrics("demo")
    old.build(version="1", python="3.11", ray="2.60")
    new.build(version="2", python="3.11", ray="2.60")
    told = 'stallfree_build_info{{model="demo",python="3.11",ray="2.60",version="{}"}}'
    store.push("ingress-old", "1", old.snapshot())
    assert scrape(store)[told.format(1)] == 1
    clock.now += 1
    store.push("ingress-new", "1", new.snapshot())
    samples = scrape(store)
    assert told.format(1) not in samples
    assert samples[told.format(2)] == 1
    clock.now += SILENT_AFTER_S + 1
    assert told.format(2) not in scrape(store)


def test_a_scrape_of_sixteen_workers_and_a_hundred_tenants_is_small_and_quick(
    store: MetricsStore, clock: FakeClock
) -> None:
    """Two ingress replicas, with dead ones before them, as after some weeks."""
    tenants = tuple(f"tenant-{number:03}" for number in range(100))
    metrics = IngressMetrics("a-model/with-a-long-name", tenants)
    for number, tenant in enumerate(tenants * 3):
        metrics.first_token(number / 7)
        metrics.tokens_delivered(number, tenant)
        metrics.request_finished("stop", 1234567 + number, number / 3, tenant)
    for life in range(MAX_DEAD_REPORTS + 3):
        for worker in range(16):
            store.push(f"worker-{worker}", f"life {life}", worker_snapshot(life, worker=worker, num_running=worker))
        store.push("ingress-a", f"life {life}", metrics.snapshot())
        store.push("ingress-b", f"life {life}", metrics.snapshot())
        clock.now += SILENT_AFTER_S + 1
    registry = registry_of(StoreCollector(store))
    took_s = min(timeit.repeat(lambda: render(registry), number=1, repeat=5))
    text = render(registry)
    print(f"{len(text)} bytes, {len(text.splitlines())} lines, {took_s * 1e3:.1f} ms")
    assert text.count("tenant-099") == 4
    assert len(text) < 1_000_000
    assert took_s < 0.1


def test_every_label_in_a_scrape_is_a_model_a_rank_a_bucket_or_of_a_closed_set(store: MetricsStore) -> None:
    store.push("some replica id", "some epoch", ingress_snapshot(1))
    store.push("worker-0", "some epoch", worker_snapshot(1))
    text = render(registry_of(StoreCollector(store)))
    assert "some replica id" not in text
    assert "some epoch" not in text
    for family in text_string_to_metric_families(text):
        metric = METRICS.get(family.name) or METRICS[f"{family.name}_total"]
        for sample in family.samples:
            own = {name: value for name, value in sample.labels.items() if name not in (*metric.identity, "le")}
            if metric.info_labels:
                assert tuple(own) == metric.info_labels
                continue
            assert own == ({} if metric.label is None else {metric.label: own[metric.label]})
            assert set(own.values()) <= set(metric.label_values)


@pytest.mark.parametrize("has_reports", [False, True])
def test_promtool_finds_nothing_to_say(store: MetricsStore, *, has_reports: bool) -> None:
    if has_reports:
        store.push("ingress", "1", ingress_snapshot(3))
        store.push("worker-0", "1", worker_snapshot(2))
    text = render(registry_of(StoreCollector(store)))
    result = subprocess.run(
        [program("promtool"), "check", "metrics"], input=text, capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
