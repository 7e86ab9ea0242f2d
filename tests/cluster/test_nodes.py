"""Several nodes in one cluster: workers spread over them, and a node that is lost costs its streams a pause."""

import asyncio
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.context import _get_global_client

from deployments.app import INGRESS_NAME, WORKER_NAME, build_with_engine
from deployments.cli.local_ray import APP_NAME, OBJECT_STORE_BYTES
from deployments.config import AppArgs, prepare_ray_environment
from tests.chaos.application import PACED_ENGINE
from tests.chaos.client import Stream, ask, ask_all, session
from tests.chaos.paced import Expected, body
from tests.end_to_end.scrape import Scrape
from tests.server_process import free_port, wait_until
from tests.tiny_models import save_tiny_model
from tests.tiny_tokenizer import save_tiny_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.ray]

NUM_NODES = 3
NUM_STREAMS = 12
NUM_TOKENS = 250
LOSS_TIMEOUT_S = 90.0


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    before = dict(os.environ)
    prepare_ray_environment(Path(__file__).resolve().parents[2])
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    nodes = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False},
    )
    try:
        for _ in range(NUM_NODES - 1):
            nodes.add_node(num_cpus=1, object_store_memory=OBJECT_STORE_BYTES)
        ray.init(address=nodes.address, log_to_driver=False, logging_level=logging.ERROR)
        yield nodes
    finally:
        if ray.is_initialized():
            serve.shutdown()
        ray.shutdown()
        nodes.shutdown()
        os.environ.clear()
        os.environ.update(before)


def nodes_of(deployment: str) -> list[str]:
    """The node of each replica that runs."""
    details = _get_global_client().get_serve_details()["applications"][APP_NAME]["deployments"][deployment]
    return [replica["node_id"] for replica in details["replicas"] if replica["state"] == "RUNNING"]


def test_workers_spread_over_nodes_and_streams_outlive_one_of_them(cluster: Cluster, tmp_path: Path):
    folder = save_tiny_tokenizer(save_tiny_model(tmp_path / "tiny", "llama"))
    port = free_port()
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    args = AppArgs(model=str(folder), num_workers=NUM_NODES, metrics_port=0)
    serve.run(build_with_engine(args, PACED_ENGINE), name=APP_NAME)
    url = f"http://127.0.0.1:{port}"
    bodies = [body([5 + i, 9], NUM_TOKENS, temperature=i % 2, seed=i) for i in range(NUM_STREAMS)]

    async def scenario() -> list[Stream]:
        streams: list[Stream] = [Stream() for _ in bodies]
        async with session(url) as http:
            asking = [asyncio.create_task(ask(http, one, stream)) for one, stream in zip(bodies, streams, strict=True)]
            while not all(stream.times_s for stream in streams):
                await asyncio.sleep(0.05)
            await asyncio.to_thread(cluster.remove_node, node_to_lose(cluster), False)
            await asyncio.gather(*asking)
        return streams

    assert len(set(nodes_of(WORKER_NAME))) == NUM_NODES
    streams = asyncio.run(scenario())
    print(f"largest gap: {max(stream.largest_gap_s for stream in streams):.1f} s")
    assert Expected(folder).faults(bodies, streams) == []
    wait_until(lambda: len(nodes_of(WORKER_NAME)) == NUM_NODES, LOSS_TIMEOUT_S)
    wait_until(lambda: num_workers_up(url) == NUM_NODES, LOSS_TIMEOUT_S)
    after = asyncio.run(ask_all(url, bodies))
    assert Expected(folder).faults(bodies, after) == []


def node_to_lose(cluster: Cluster) -> Any:
    """One with a worker and without the ingress, which takes its streams along."""
    return next(
        node
        for node in cluster.worker_nodes
        if node.node_id in nodes_of(WORKER_NAME) and node.node_id not in nodes_of(INGRESS_NAME)
    )


def num_workers_up(url: str) -> float:
    """As the metrics actor knows them."""
    return Scrape(httpx.get(f"{url}/metrics", timeout=10).text).value("stallfree_worker_up")
