"""The metrics under vLLM's names: there when they are wanted, with our values."""

from prometheus_client.parser import text_string_to_metric_families

from monitoring.exposition import StoreCollector, registry_of, render
from monitoring.ingress_metrics import IngressMetrics
from monitoring.metrics_actor import MetricsActor
from monitoring.metrics_store import MetricsStore
from monitoring.worker_metrics import WorkerMetrics
from scheduler.records import PreemptionRecord, StepRecord

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def filled_store() -> MetricsStore:
    store = MetricsStore(lambda: 1000.0)
    ingress = IngressMetrics("demo")
    for number in range(1, 6):
        ingress.first_token(number / 10)
        ingress.inter_token(number / 100)
        ingress.tokens_delivered(number)
        ingress.request_sizes(10 * number, number, number / 50)
        ingress.request_finished("length", 10 * number, float(number))
    ingress.request_finished("stop", 7, 1.0)
    store.push("ingress", "1", ingress.snapshot())
    for rank in (0, 1):
        worker = WorkerMetrics("demo", rank, block_size=16)
        worker.tell(
            dict.fromkeys(
                (
                    *("version", "torch", "device", "dtype", "attention_backend", "max_model_len"),
                    *("scheduler_policy", "queue_policy", "preemption_mode", "prefix_caching"),
                ),
                "x",
            )
            | {"block_size": "16"}
        )
        step = StepRecord(step_id=1, time_s=0.0, max_num_batched_tokens=64, num_batched_tokens=40, duration_s=0.01)
        step.num_blocks_queried, step.num_blocks_hit = 6, 2 + rank
        modes = ("swap", "recompute")
        step.preemptions = [PreemptionRecord("a", mode, "blocks", "b", 1, 0, 0.0, 0.0) for mode in modes]
        worker.fold([step])
        worker.set_pool_sizes(num_device_blocks=101, num_host_blocks=10)
        worker.set_load(
            num_waiting=3 + rank,
            num_running=5,
            num_swapped=1,
            num_used_device_blocks=25,
            num_used_host_blocks=1,
            num_cached_device_blocks=2,
        )
        store.push(f"worker-{rank}", "1", worker.snapshot())
    return store


def samples(store: MetricsStore, *, with_vllm_names: bool = True) -> Samples:
    text = render(registry_of(StoreCollector(store, with_vllm_names=with_vllm_names)))
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def of_model(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset({"model_name": "demo", **labels}.items())


def test_they_are_there_only_if_they_are_wanted() -> None:
    store = filled_store()
    plain, both = samples(store, with_vllm_names=False), samples(store)
    assert not [name for name, _ in plain if name.startswith("vllm:")]
    assert plain.items() <= both.items()


def test_values_are_those_of_our_own_names() -> None:
    store = filled_store()
    found = samples(store)
    for ours, theirs in (
        ("stallfree_time_to_first_token_seconds", "vllm:time_to_first_token_seconds"),
        ("stallfree_inter_token_latency_seconds", "vllm:inter_token_latency_seconds"),
        ("stallfree_inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
        ("stallfree_request_time_per_output_token_seconds", "vllm:request_time_per_output_token_seconds"),
        ("stallfree_e2e_request_latency_seconds", "vllm:e2e_request_latency_seconds"),
        ("stallfree_request_prompt_tokens", "vllm:request_prompt_tokens"),
        ("stallfree_request_generation_tokens", "vllm:request_generation_tokens"),
    ):
        for suffix in ("_count", "_sum", "_bucket"):
            own = [
                (labels - {("model", "demo")}, value)
                for (name, labels), value in found.items()
                if name == ours + suffix
            ]
            assert own
            for labels, value in own:
                assert found[of_model(theirs + suffix, **dict(labels))] == value
    assert found[of_model("vllm:prompt_tokens_total")] == 157
    assert found[of_model("vllm:generation_tokens_total")] == 15
    assert found[of_model("vllm:request_success_total", finished_reason="length")] == 5
    assert found[of_model("vllm:request_success_total", finished_reason="stop")] == 1


def test_each_worker_is_an_engine() -> None:
    found = samples(filled_store())
    for rank in (0, 1):
        engine = str(rank)
        assert found[of_model("vllm:num_requests_waiting", engine=engine)] == 3 + rank
        assert found[of_model("vllm:num_requests_running", engine=engine)] == 5
        assert found[of_model("vllm:num_requests_swapped", engine=engine)] == 1
        assert found[of_model("vllm:kv_cache_usage_perc", engine=engine)] == 0.25
        assert found[of_model("vllm:num_preemptions_total", engine=engine)] == 2
        assert found[of_model("vllm:prefix_cache_queries_total", engine=engine)] == 96
        assert found[of_model("vllm:prefix_cache_hits_total", engine=engine)] == 32 + 16 * rank
        assert found[of_model("vllm:iteration_tokens_total_sum", engine=engine)] == 40
        cache = of_model("vllm:cache_config_info", engine=engine, block_size="16", num_gpu_blocks="100")
        assert found[cache] == 1


def test_an_actor_can_be_told_to_show_them_and_no_longer_to() -> None:
    actor = MetricsActor("127.0.0.1", 0)
    actor.push("ingress", "1", IngressMetrics("demo").snapshot())
    assert "vllm:" not in actor.render()
    actor.show_vllm_names(is_wanted=True)
    assert 'vllm:generation_tokens_total{model_name="demo"} 0.0' in actor.render()
    actor.show_vllm_names(is_wanted=False)
    assert "vllm:" not in actor.render()
