"""The application on a real Ray cluster as its operator sees it: workers follow the load, a frozen one shows, the end.

One cluster and one application for the module, with the small engine in its workers; the last test ends it.
"""

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from ray import serve

from deployments.app import WORKER_NAME, build_with_engine
from deployments.cli.local_ray import APP_NAME, OBJECT_STORE_BYTES, RunningApp
from deployments.config import AppArgs, prepare_ray_environment
from deployments.frames import Tokens
from deployments.scaling import UP_SHARE
from monitoring import metrics_actor
from tests.fake_engine import PID, PRIORITY, PRIORITY_BASE, START_CONFIG
from tests.ray_start import local_ray
from tests.server_process import free_port, wait_until
from tests.tiny_models import save_tiny_model
from tests.tiny_tokenizer import save_tiny_tokenizer
from worker.types import EngineRequest, SamplingParams

pytestmark = [pytest.mark.ray, pytest.mark.slow]

#: to whoever asks
SHOWS_WITHIN_S = 10.0
ALMOST_ENDLESS = 3000


@dataclass(frozen=True)
class Served:
    running: RunningApp
    url: str
    model: str

    def gauges(self, name: str) -> dict[str, float]:
        lines = [line for line in httpx.get(f"{self.url}/metrics").text.splitlines() if line.startswith(name + "{")]
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}

    def ready_status(self) -> int:
        return httpx.get(f"{self.url}/ready", timeout=30).status_code


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = save_tiny_tokenizer(save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", "llama"))
    args = AppArgs(
        model=str(folder),
        metrics_port=0,
        drain_timeout_s=3.0,
        max_workers=2,
        scale_up_delay_s=0.5,
        scale_down_delay_s=1.0,
    )
    port = free_port()
    prepare_ray_environment(Path(__file__).resolve().parents[1])
    with local_ray(include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES) as started:
        running = RunningApp(started.address)
        try:
            running.start_ray()
            running.deploy(build_with_engine(args, "tests.fake_engine:build"), "127.0.0.1", port)
            yield Served(running, f"http://127.0.0.1:{port}", str(folder))
        finally:
            running.stop_app()
            running.stop_ray()


def body(max_tokens: int, *, stream: bool = True) -> dict[str, object]:
    prompt = [7, 8, 9]
    return {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "stream": stream, "ignore_eos": True}


@asynccontextmanager
async def open_streams(url: str, count: int) -> AsyncIterator[None]:
    """So many answers have begun; they are left at the end."""
    num_begun = 0

    async def one(http: httpx.AsyncClient) -> None:
        nonlocal num_begun
        async with http.stream("POST", "/v1/completions", json=body(ALMOST_ENDLESS)) as response:
            assert response.status_code == 200, await response.aread()
            chunks = response.aiter_text()
            await anext(chunks)
            num_begun += 1
            async for _ in chunks:
                pass

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as http:
        streams = [asyncio.create_task(one(http)) for _ in range(count)]
        try:
            async with asyncio.timeout(30):
                while num_begun < count:
                    for stream in streams:
                        if stream.done():
                            stream.result()
                    await asyncio.sleep(0.05)
            yield
        finally:
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)


def num_running_workers() -> int:
    return serve.status().applications[APP_NAME].deployments[WORKER_NAME].replica_states.get("RUNNING", 0)


def worker_pid() -> int:
    handle = serve.get_deployment_handle(WORKER_NAME, app_name=APP_NAME).options(method_name="generate", stream=True)
    request = EngineRequest("pid", [PID], SamplingParams(max_tokens=1))
    for frames in handle.remote(request):
        for frame in frames:
            if isinstance(frame, Tokens):
                return frame.events[0].token_ids[0]
    raise AssertionError("no token came")


def test_workers_come_with_the_load_and_go_with_it(served: Served) -> None:
    async def scenario() -> tuple[dict[str, float], dict[str, float]]:
        async with open_streams(served.url, START_CONFIG.max_num_seqs - 4):
            await asyncio.to_thread(wait_until, lambda: num_running_workers() == 2, 60.0)
            # Its metrics come from two ranks now.
            await asyncio.to_thread(wait_until, lambda: len(served.gauges("stallfree_worker_up")) == 2, 10.0)
            return served.gauges("stallfree_scaling_demand"), {
                **served.gauges("stallfree_scaling_workers"),
                **served.gauges("stallfree_scaling_seen_demand"),
            }

    demand, choice = asyncio.run(scenario())
    assert choice['stallfree_scaling_workers{deployment="Worker",kind="asked"}'] == 2.0
    assert choice['stallfree_scaling_workers{deployment="Worker",kind="wanted"}'] >= 2.0
    assert choice['stallfree_scaling_workers{deployment="Worker",kind="most"}'] == 2.0
    # What it chose follows from what it saw.
    assert choice['stallfree_scaling_seen_demand{deployment="Worker",resource="sequences"}'] > UP_SHARE
    assert sum(value for series, value in demand.items() if 'resource="sequences"' in series) > 0.8
    wait_until(lambda: num_running_workers() == 1, 60.0)
    wait_until(lambda: len(served.gauges("stallfree_worker_up")) == 1, 20.0)
    assert list(served.gauges("stallfree_worker_up")) == ['stallfree_worker_up{model="tiny",worker="0"}']
    assert httpx.post(f"{served.url}/v1/completions", json=body(3, stream=False), timeout=30).status_code == 200


def test_a_busy_worker_is_ready(served: Served) -> None:
    async def scenario() -> None:
        async with open_streams(served.url, 30):
            assert await asyncio.to_thread(served.ready_status) == 200

    asyncio.run(scenario())


KEY, ADMIN_KEY = "sk-ordinary-4711", "sk-admin-0815"
KEYS = [{"key": KEY, "tenant": "team-a", "max_priority": -5}, {"key": ADMIN_KEY, "tenant": "operations", "admin": True}]


@pytest.fixture
def guarded(served: Served, tmp_path: Path) -> Iterator[str]:
    """The address of a second application beside the first, below a prefix of its own, that wants keys."""
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps(KEYS))
    args = AppArgs(model=served.model, metrics_port=0, drain_timeout_s=0.5, api_key_file=str(keys))
    serve.run(build_with_engine(args, "tests.fake_engine:build"), name="guarded", route_prefix="/guarded")
    try:
        yield f"{served.url}/guarded"
    finally:
        serve.delete("guarded")
        metrics_actor.remove("guarded")


def test_every_route_but_the_probes_wants_a_key_and_a_key_says_whose_and_how_urgent(guarded: str) -> None:
    def bearer(key: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {key}"}

    with httpx.Client(base_url=guarded, timeout=30) as http:
        page = http.get("/openapi.json", headers=bearer(KEY)).json()
        operations = [(method, path) for path, methods in page["paths"].items() for method in methods]
        assert len(operations) > 12
        operations += [("get", path) for path in ("/openapi.json", "/docs", "/dashboard/data", "/nothing")]
        for method, path in operations:
            is_open = path in ("/health", "/ready")
            for headers in ({}, bearer("sk-wrong"), {"x-api-key": "sk-wrong"}):
                answer = http.request(method, path.replace("{model_id}", "tiny"), headers=headers)
                assert answer.status_code == (200 if is_open else 401), (method, path)
        assert http.get("/metrics", headers=bearer(KEY)).status_code == 403

        def answer_of(key: str) -> str:
            asked = {**body(1, stream=False), "prompt": [PRIORITY], "priority": -50, "user": "mallory"}
            text: str = http.post("/v1/completions", json=asked, headers=bearer(key)).json()["choices"][0]["text"]
            return text

        def text_of(priority: int) -> str:
            tokens = {"tokens": [PRIORITY_BASE + priority]}
            text: str = http.post("/detokenize", json=tokens, headers={"x-api-key": KEY}).json()["prompt"]
            return text

        assert text_of(-5) != text_of(-50)
        assert (answer_of(KEY), answer_of(ADMIN_KEY)) == (text_of(-5), text_of(-50))
        metrics = http.get("/metrics", headers=bearer(ADMIN_KEY))
        for tenant, count in (("team-a", 1.0), ("operations", 1.0), ("other", 0.0)):
            assert f'stallfree_tenant_requests_total{{model="tiny",tenant="{tenant}"}} {count}' in metrics.text
        assert "mallory" not in metrics.text


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            print("Serve has ended it already")


def test_the_only_worker_frozen_shows_in_ready_and_metrics_and_the_api_lives(served: Served) -> None:
    assert served.ready_status() == 200
    with frozen(worker_pid()):
        began_s = time.monotonic()
        wait_until(lambda: served.ready_status() == 503, SHOWS_WITHIN_S)
        wait_until(lambda: set(served.gauges("stallfree_worker_up").values()) == {0.0}, SHOWS_WITHIN_S)
        assert time.monotonic() - began_s < SHOWS_WITHIN_S
        assert httpx.get(f"{served.url}/health", timeout=2).status_code == 200
        # Serve ends it and starts another one.
        wait_until(lambda: served.ready_status() == 200, 60.0)
    assert httpx.post(f"{served.url}/v1/completions", json=body(3, stream=False), timeout=30).status_code == 200


def test_a_stop_gives_running_answers_their_time_then_an_error_and_takes_nobody_in(served: Served) -> None:
    seen: dict[str, str] = {}

    def ask(name: str, max_tokens: int) -> None:
        with httpx.stream("POST", f"{served.url}/v1/completions", json=body(max_tokens), timeout=30) as response:
            seen[name] = ""
            for text in response.iter_text():
                seen[name] += text

    threads = [threading.Thread(target=ask, args=item) for item in (("short", 150), ("long", ALMOST_ENDLESS))]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(seen) == 2 and all(seen.values()), 20.0)
    stop = threading.Thread(target=served.running.stop_app, args=(3.0,))
    began_s = time.monotonic()
    stop.start()
    wait_until(lambda: served.ready_status() == 503, 3.0)
    late = httpx.post(f"{served.url}/v1/completions", json=body(3, stream=False), timeout=30)
    assert late.status_code == 503
    assert late.json()["error"]["code"] == "server_stopping"
    for thread in threads:
        thread.join(20.0)
    assert 2.5 < time.monotonic() - began_s < 8.0
    stop.join(60.0)
    assert seen["short"].rstrip().endswith("data: [DONE]")
    assert '"code":"server_stopping"' in seen["long"]
    assert "[DONE]" not in seen["long"]
