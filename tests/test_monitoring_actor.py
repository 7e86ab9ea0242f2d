"""The metrics actor: its scrape port, and as a named Ray actor that survives being killed."""

import logging
import socket
import time
import urllib.request
from collections.abc import Iterator

import pytest
import ray

from monitoring.ingress_metrics import IngressMetrics
from monitoring.metrics_actor import NAMESPACE, MetricsActor, actor_name, get_or_create, remove
from monitoring.metrics_store import Inheritance
from monitoring.worker_metrics import WorkerMetrics
from tests.ray_start import local_ray

HOST = "127.0.0.1"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])


def get(port: int) -> str:
    with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=10) as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return str(response.read().decode())


def answers(num_answers: int) -> IngressMetrics:
    metrics = IngressMetrics("demo")
    for _ in range(num_answers):
        metrics.request_finished("length", 3, 0.5)
    return metrics


def answered(text: str) -> float:
    prefix = 'stallfree_requests_total{finish_reason="length",model="demo"} '
    return next(float(line.removeprefix(prefix)) for line in text.splitlines() if line.startswith(prefix))


def test_the_scrape_port_serves_what_render_returns() -> None:
    port = free_port()
    actor = MetricsActor(HOST, port)
    actor.push("ingress", "1", answers(3).snapshot())
    assert get(port) == actor.render()
    assert answered(actor.render()) == 3
    actor.listen(HOST, 0)


def test_prometheus_gets_names_with_their_colons_whatever_format_it_prefers() -> None:
    port = free_port()
    actor = MetricsActor(HOST, port, with_vllm_names=True)
    actor.push("ingress", "1", answers(3).snapshot())
    accept = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.4"
    request = urllib.request.Request(f"http://{HOST}:{port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as response:
        assert response.read().decode() == actor.render()
    assert 'vllm:prompt_tokens_total{model_name="demo"} 9.0' in actor.render()
    actor.listen(HOST, 0)


def test_port_zero_opens_nothing_and_a_new_port_replaces_the_old() -> None:
    actor = MetricsActor(HOST, 0)
    first, second = free_port(), free_port()
    assert actor.listen(HOST, first)
    assert actor.listen(HOST, first)
    assert actor.listen(HOST, second)
    get(second)
    with pytest.raises(OSError, match="refused"):
        get(first)
    assert not actor.listen(HOST, 0)
    with pytest.raises(OSError, match="refused"):
        get(second)


def test_a_taken_scrape_port_is_named_in_one_log_line_and_metrics_go_on(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as other, caplog.at_level(logging.ERROR):
        other.bind((HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        actor = MetricsActor(HOST, port)
        assert not actor.listen(HOST, port)
        actor.push("ingress", "1", answers(2).snapshot())
        assert answered(actor.render()) == 2
    assert [record.message for record in caplog.records if f"{HOST}:{port}" in record.message] == [
        record.message for record in caplog.records
    ]
    assert len(caplog.records) == 1
    assert actor.listen(HOST, port)
    assert answered(get(port)) == 2
    actor.listen(HOST, 0)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with local_ray(num_cpus=1, include_dashboard=False) as started:
        ray.init(address=started.address, log_to_driver=False, configure_logging=False)
        yield
        ray.shutdown()


def push_until_restarted(actor: ray.actor.ActorHandle, metrics: IngressMetrics, heritage: Inheritance) -> None:
    """The killed actor may answer once more before it is gone: its successor is known by another store's id."""
    deadline = time.monotonic() + 60
    while True:
        assert time.monotonic() < deadline, "the actor did not come back"
        try:
            reply = ray.get(actor.push.remote("alive", "1", metrics.snapshot(), heritage), timeout=30)
        except ray.exceptions.RayActorError:
            time.sleep(0.1)
        else:
            if reply["store_id"] != heritage["store_id"]:
                return


@pytest.mark.ray
def test_the_named_actor_is_shared_scraped_and_keeps_its_counters_over_a_restart(cluster: None) -> None:
    port = free_port()
    actor = get_or_create("shop", HOST, port)
    assert get_or_create("shop", HOST, port) == actor == ray.get_actor(actor_name("shop"), namespace=NAMESPACE)
    assert get_or_create("another", HOST, 0) != actor

    ray.get(actor.push.remote("gone", "1", answers(5).snapshot()))
    ray.get(actor.drop.remote("gone"))
    ray.get(actor.push.remote("worker-0", "1", WorkerMetrics("demo", 0).snapshot()))
    heritage = ray.get(actor.push.remote("alive", "1", answers(2).snapshot()))
    assert answered(get(port)) == 7

    ray.kill(actor, no_restart=False)
    push_until_restarted(actor, answers(4), heritage)
    assert answered(get(port)) == 9
    assert answered(ray.get(actor.render.remote())) == 9


@pytest.mark.ray
def test_removing_the_actor_forgets_it_and_frees_its_name(cluster: None) -> None:
    old = get_or_create("short-lived", HOST, 0)
    ray.get(old.push.remote("alive", "1", answers(2).snapshot()))
    remove("short-lived")
    remove("never there")
    deadline = time.monotonic() + 30
    while True:
        try:
            text = ray.get(get_or_create("short-lived", HOST, 0).render.remote())
            break
        except ray.exceptions.RayActorError:
            assert time.monotonic() < deadline, "the name stayed taken"
            time.sleep(0.1)
    assert "demo" not in text
