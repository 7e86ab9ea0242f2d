"""A real Prometheus beside two workers under mixed load: every panel and rule has data, numbers are the clients'
own, and no counter goes down when a worker and the metrics actor are killed.

One run for the module, in this order: load that fills the workers, an overload, a worker killed under its streams,
the actor killed.
"""

import asyncio
import json
import os
import signal
import time
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

import aiohttp
import httpx
import pytest
import ray

from monitoring.grafana.build import DASHBOARDS
from monitoring.metrics_actor import NAMESPACE, actor_name
from monitoring.metrics_store import SILENT_AFTER_S
from monitoring.table import METRICS, MetricKind
from tests.chaos.client import Stream, ask, ask_all
from tests.chaos.paced import body, paced_args, paced_environment
from tests.chaos.server import APP_NAME, ChaosServer, chaos_server
from tests.end_to_end.scrape import Growth, Scrape
from tests.grafana.expressions import filled_in
from tests.grafana.prometheus_process import Prometheus, prometheus
from tests.server_process import free_port, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.ray]

#: of a pool that does not hold what may run at once
ENGINE_OPTIONS = {
    "max_num_batched_tokens": 48,
    "max_num_seqs": 8,
    "num_device_blocks": 40,
    "num_host_blocks": 24,
    "max_model_len": 600,
    "preemption_mode": "swap",
    "max_queued_requests": 6,
    "target_itl_ms": 60.0,
}
TENANT_OPTIONS = {"tenant_header": "x-tenant", "tenant_weights": "alpha=1,beta=2"}
#: long enough that the processors have time for the clients, whose times are compared
STEP_MS = 40
#: requests at once that fill the pools
NUM_CALM = 8
#: what a panel can be empty without, and what below causes it
EVENTS = {"a queue": "overload", "a preemption by swap": "overload"}
UP_AGAIN_TIMEOUT_S = 60.0
#: of the server's times from the clients'
MOST_APART_S, MOST_APART_SHARE = 0.005, 0.05
INTERVAL = "10s"


@dataclass
class Run:
    """What the clients saw, and scrapes around the calm load (`calm`) and around everything (`whole`)."""

    prometheus: Prometheus
    calm: Growth
    whole: Growth
    calm_streams: list[Stream]
    streams: list[Stream] = field(default_factory=list)
    log_lines: list[dict[str, Any]] = field(default_factory=list)


def mixed_bodies(num: int, first: int, max_tokens: int = 30) -> list[dict[str, Any]]:
    """Short and long prompts, half of which begin alike."""
    prompts = [[7 + i % 2 * (13 + first + i)] + [7, 9] * (10 + 40 * (i % 4)) + [20 + first + i] for i in range(num)]
    return [body(prompt, max_tokens + i % 9, temperature=i % 2) for i, prompt in enumerate(prompts)]


async def as_tenants(url: str, bodies: list[dict[str, Any]]) -> list[Stream]:
    """All at once, by turns of two declared tenants and one that is not."""

    async def as_tenant(tenant: str, own: list[dict[str, Any]]) -> list[Stream]:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(base_url=url, headers={"x-tenant": tenant}, connector=connector) as http:
            return await asyncio.gather(*(ask(http, asked) for asked in own))

    by_tenant = {tenant: bodies[number::3] for number, tenant in enumerate(("alpha", "beta", "somebody"))}
    streams = await asyncio.gather(*(as_tenant(tenant, own) for tenant, own in by_tenant.items()))
    return [stream for own in streams for stream in own]


def settled_scrape(server: ChaosServer) -> Scrape:
    """When both workers report (a new actor knows them a second later) and nothing runs."""

    def do_both_report() -> bool:
        response = httpx.get(f"{server.url}/metrics", timeout=10)
        assert response.status_code in (200, 503)
        return response.text.count("\nstallfree_worker_up{") == 2

    wait_until(do_both_report, 60.0)
    wait_until(server.is_idle, 60.0)
    time.sleep(1.5)  # workers report once a second
    return server.scrape()


def kill_a_worker(server: ChaosServer) -> list[Stream]:
    """While it has streams; they end on the other one."""
    pids = server.worker_pids()

    async def scenario() -> list[Stream]:
        asking = asyncio.create_task(ask_all(server.url, mixed_bodies(6, 150, max_tokens=50)))
        await asyncio.sleep(0.7)
        os.kill(pids[0], signal.SIGKILL)
        return await asking

    streams = asyncio.run(scenario())
    wait_until(lambda: len(set(server.worker_pids()) - {pids[0]}) == 2, UP_AGAIN_TIMEOUT_S)
    # Only what has been dead for a while is handed on to another actor.
    time.sleep(SILENT_AFTER_S + 2.5)
    return streams


def kill_the_actor(server: ChaosServer) -> list[Stream]:
    async def scenario() -> list[Stream]:
        asking = asyncio.create_task(ask_all(server.url, mixed_bodies(4, 180, max_tokens=20)))
        await asyncio.sleep(0.7)
        ray.kill(ray.get_actor(actor_name(APP_NAME), namespace=NAMESPACE), no_restart=False)
        return await asking

    return asyncio.run(scenario())


@pytest.fixture(scope="module")
def run(paced_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    port = free_port()
    folder = tmp_path_factory.mktemp("prometheus")
    log = folder / "requests.jsonl"
    shown = {"metrics_port": port, "vllm_metric_names": True, "request_log": str(log)}
    args = paced_args(paced_folder, 2, **ENGINE_OPTIONS, **TENANT_OPTIONS) | shown
    with prometheus(folder, f"127.0.0.1:{port}") as asked, chaos_server(args, paced_environment(STEP_MS)) as server:
        wait_until(lambda: len(asked.newest("stallfree_worker_up == 1")) == 2, UP_AGAIN_TIMEOUT_S)
        first = settled_scrape(server)
        calm_streams = asyncio.run(ask_all(server.url, mixed_bodies(16, 0), num_at_once=NUM_CALM))
        after_calm = settled_scrape(server)
        streams = asyncio.run(as_tenants(server.url, mixed_bodies(44, 60, max_tokens=20)))
        streams += kill_a_worker(server)
        streams += kill_the_actor(server)
        last = settled_scrape(server)
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        yield Run(asked, Growth(first, after_calm), Growth(first, last), calm_streams, calm_streams + streams, lines)


def test_every_panel_has_data(run: Run) -> None:
    assert {panel.needs for board in DASHBOARDS for panel in board.panels} - {""} == set(EVENTS)
    empty = [
        f"{board.uid} / {panel.title}: {query.expr}"
        for board in DASHBOARDS
        for panel in board.panels
        for query in panel.queries
        if not run.prometheus.has_data(filled_in(query.expr, INTERVAL))
    ]
    assert empty == []


def test_every_rule_is_well_and_every_recording_has_data(run: Run) -> None:
    rules = run.prometheus.rules()
    assert len(rules) == 27
    assert [(rule["name"], rule.get("lastError")) for rule in rules if rule["health"] != "ok"] == []
    recordings = [rule["name"] for rule in rules if rule["type"] == "recording"]
    assert [name for name in recordings if not run.prometheus.has_data(name)] == []


def test_what_was_caused_is_counted(run: Run) -> None:
    num_rejected = sum(stream.status == 429 for stream in run.streams)
    assert num_rejected > 0
    assert run.whole("stallfree_rejections_total", reason="queue_full") == num_rejected
    assert run.whole("stallfree_failovers_total", reason="died") > 0
    assert run.whole("stallfree_preemptions_total", mode="swap") > 0
    for tenant in ("alpha", "beta", "other"):
        assert run.whole("stallfree_tenant_requests_total", tenant=tenant) > 0
    assert len(run.prometheus.newest("stallfree_worker_up == 1")) == 2


def test_no_counter_went_down(run: Run) -> None:
    window = f"{int(time.time() - run.prometheus.began_s) + 1}s"
    counters = [metric.name for metric in METRICS.values() if metric.kind is MetricKind.COUNTER]
    histograms = [metric.name for metric in METRICS.values() if metric.kind is MetricKind.HISTOGRAM]
    for name in (*counters, *(f"{each}_{part}" for each in histograms for part in ("sum", "count", "bucket"))):
        [highest] = run.prometheus.newest(f"max(resets({name}[{window}]))")
        assert highest["value"][1] == "0", name


def test_tokens_are_the_sums_of_all_usage(run: Run) -> None:
    answered = [stream for stream in run.streams if stream.status == 200]
    assert all(stream.is_done for stream in answered)
    usages = [stream.usage for stream in answered if stream.usage is not None]
    assert len(usages) == len(answered)
    assert run.whole("stallfree_requests_total") == len(usages)
    for field_name, metric in (
        ("prompt_tokens", "stallfree_prompt_tokens_total"),
        ("completion_tokens", "stallfree_generation_tokens_total"),
    ):
        total = sum(usage[field_name] for usage in usages)
        assert run.whole(metric) == total
        assert run.whole(metric.replace("stallfree_", "stallfree_tenant_")) == total
        assert run.whole(metric.replace("stallfree_", "vllm:")) == total
        assert sum(line[field_name] for line in run.log_lines) == total


def test_each_answer_has_a_line_in_the_log_and_dashboards_of_vllm_have_data(run: Run) -> None:
    answered = [stream.response_id for stream in run.streams if stream.status == 200]
    assert sorted(line["id"] for line in run.log_lines) == sorted(answered)
    for name in ("vllm:num_requests_running", "vllm:kv_cache_usage_perc", "vllm:time_to_first_token_seconds_bucket"):
        assert run.prometheus.has_data(name), name


def test_means_and_percentiles_are_the_clients_own(run: Run) -> None:
    assert {stream.status for stream in run.calm_streams} == {200}
    seen_s = {
        "stallfree_time_to_first_token_seconds": [stream.ttft_s for stream in run.calm_streams],
        "stallfree_inter_token_latency_seconds": [gap for stream in run.calm_streams for gap in stream.gaps_s],
        "stallfree_e2e_request_latency_seconds": [stream.times_s[-1] - stream.sent_s for stream in run.calm_streams],
    }
    for metric, clients_s in seen_s.items():
        count = run.calm(f"{metric}_count")
        assert count == len(clients_s), metric
        mean_s, clients_mean_s = run.calm(f"{metric}_sum") / count, sum(clients_s) / len(clients_s)
        print(f"{metric}: {mean_s * 1e3:.1f} ms, clients {clients_mean_s * 1e3:.1f} ms")
        assert abs(clients_mean_s - mean_s) <= max(MOST_APART_S, MOST_APART_SHARE * clients_mean_s), metric
        bounds = METRICS[metric].buckets
        cumulated = [run.calm(f"{metric}_bucket", le=str(bound)) for bound in bounds]
        for percent in (50, 90):
            bucket = next(number for number, n in enumerate(cumulated) if n >= count * percent / 100)
            clients_bucket = bisect_left(bounds, quantiles(clients_s, n=100)[percent - 1])
            assert abs(bucket - clients_bucket) <= 1, f"p{percent} of {metric}"
