"""The application on a real Ray cluster, with the small engine in its workers: streams, balance, failures.

One cluster and one application for the whole module; the tests that kill workers come last.
"""

import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from ray import serve
from ray.serve._private.logging_utils import get_serve_logs_dir
from ray.serve.handle import DeploymentHandle

from deployments.app import WORKER_NAME, build_with_engine
from deployments.cli.local_ray import APP_NAME, OBJECT_STORE_BYTES, RunningApp, StartError
from deployments.config import AppArgs, prepare_ray_environment
from deployments.failover import FailoverClient
from deployments.frames import Accepted, Frame, Tokens
from deployments.readiness import ANSWER_TIMEOUT_S, KEEP_S
from deployments.router_state import ROUTER_STATE
from deployments.serve_client import ClientTimeouts, ServeWorkerClient
from deployments.worker_client import RequestRejectedError, WorkerClient, WorkerFailedError, WorkerLostError
from tests.fake_engine import DIE, HANG, HANG_S, NEVER_FITS, PID, expected_tokens
from tests.ray_start import local_ray
from tests.server_process import free_port, wait_until
from tests.tiny_models import save_tiny_model
from tests.tiny_tokenizer import save_tiny_tokenizer
from worker.types import EngineRequest, SamplingParams

pytestmark = pytest.mark.ray

ENDLESS = 100_000
TIMEOUTS = ClientTimeouts(accept_s=20.0, stall_s=5.0, step_s=60.0)


@dataclass(frozen=True)
class Cluster:
    running: RunningApp
    args: AppArgs
    url: str
    port: int

    @property
    def worker(self) -> DeploymentHandle:
        return serve.get_deployment_handle(WORKER_NAME, app_name=APP_NAME)

    def client(self) -> ServeWorkerClient:
        return ServeWorkerClient(self.worker, TIMEOUTS, ROUTER_STATE)

    def failover_client(self, timeouts: ClientTimeouts, reasons: list[str]) -> FailoverClient:
        """Appends to `reasons` why workers were lost."""
        return FailoverClient(
            ServeWorkerClient(self.worker, timeouts, ROUTER_STATE), timeouts.accept_s, reasons.append
        )


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = save_tiny_tokenizer(save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", "llama"))
    args = AppArgs(model=str(folder), num_workers=2, metrics_port=free_port(), drain_timeout_s=2.0)
    port = free_port()
    prepare_ray_environment(Path(__file__).resolve().parents[1])
    with local_ray(include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES) as started:
        running = RunningApp(started.address)
        try:
            running.start_ray()
            running.deploy(build_with_engine(args, "tests.fake_engine:build"), "127.0.0.1", port)
            yield Cluster(running, args, f"http://127.0.0.1:{port}", port)
        finally:
            running.stop_app()
            running.stop_ray()


def request(request_id: str, prompt: list[int], max_tokens: int) -> EngineRequest:
    return EngineRequest(request_id, prompt, SamplingParams(max_tokens=max_tokens))


async def frames_of(client: WorkerClient, asked: EngineRequest) -> list[Frame]:
    return [frame async for frames in client.generate(asked) for frame in frames]


async def rest_of(stream: AsyncIterator[list[Frame]]) -> list[Frame]:
    return [frame async for frames in stream for frame in frames]


def tokens_of(frames: list[Frame], index: int = 0) -> list[int]:
    events = [event for frame in frames if isinstance(frame, Tokens) for event in frame.events]
    return [token_id for event in events if event.index == index for token_id in event.token_ids]


def gauges(cluster: Cluster, name: str) -> dict[str, float]:
    """The series of one metric, as a scrape of the ingress sees them."""
    text = httpx.get(f"{cluster.url}/metrics").text
    lines = [line for line in text.splitlines() if line.startswith(name + "{")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def body(prompt: list[int] | str, max_tokens: int, *, stream: bool = True) -> dict[str, object]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "stream": stream, "ignore_eos": True}


def test_it_is_ready_and_names_its_model(cluster: Cluster):
    assert httpx.get(f"{cluster.url}/ready").status_code == 200
    assert httpx.get(f"{cluster.url}/health").status_code == 200
    models = httpx.get(f"{cluster.url}/v1/models").json()
    assert [model["id"] for model in models["data"]] == ["tiny"]


def test_unknown_fields_are_a_warning_in_the_replicas_log_at_once(cluster: Cluster):
    asked = body([1, 2], 2, stream=False) | {"flavour_4711": 1}
    assert httpx.post(f"{cluster.url}/v1/completions", json=asked, timeout=60).status_code == 200
    logs = Path(get_serve_logs_dir()).glob("replica_*.log")
    lines = [line for log in logs for line in log.read_text().splitlines()]
    (line,) = [line for line in lines if "flavour_4711" in line]
    assert line.startswith("WARNING ")


def test_ids_of_clients_come_through_the_proxy(cluster: Cluster):
    asked = body([1, 2], 2, stream=False)
    for given in ("a/b?x", ""):
        headers = {"x-request-id": given}
        answer = httpx.post(f"{cluster.url}/v1/completions", json=asked, headers=headers, timeout=60)
        (found,) = answer.headers.get_list("x-request-id")
        assert found == given or (not given and found)
        explained = httpx.get(f"{cluster.url}/v1/requests/{quote(found, safe='')}/explain", timeout=60)
        assert explained.json()["id"] == answer.json()["id"]


@pytest.mark.parametrize("num_chars", [4_100_000, 1_500_000])
def test_a_request_or_a_response_of_more_than_four_mebibytes_comes_through(cluster: Cluster, num_chars: int):
    # Beyond gRPC's own limit for a message: 4 MiB.
    text = "a" * num_chars
    response = httpx.post(f"{cluster.url}/tokenize", json={"model": "tiny", "prompt": text}, timeout=60)
    assert response.status_code == 200, response.text[:500]
    assert len(response.content) > 4 * 1024 * 1024
    assert response.json()["count"] >= num_chars // 4


def test_a_worker_tells_its_facts_and_answers(cluster: Cluster):
    frames = asyncio.run(frames_of(cluster.client(), request("one", [3, 4], 12)))
    assert isinstance(frames[0], Accepted)
    assert tokens_of(frames) == expected_tokens([3, 4], 12)


def test_sixty_four_streams_are_exact_and_shared_by_both_workers_twice(cluster: Cluster):
    client = cluster.client()

    async def round_(name: str) -> list[list[Frame]]:
        asked = [request(f"{name}-{i}", [i + 1, 9], 30) for i in range(64)]
        return await asyncio.gather(*(frames_of(client, one) for one in asked))

    async def scenario() -> list[list[list[Frame]]]:
        return [await round_("first"), await round_("second")]

    for answers in asyncio.run(scenario()):
        workers = Counter(frames[0].worker for frames in answers if isinstance(frames[0], Accepted))
        assert sorted(workers) == [0, 1]
        assert min(workers.values()) >= 16
        for i, frames in enumerate(answers):
            assert tokens_of(frames) == expected_tokens([i + 1, 9], 30)


def test_sixty_four_http_streams_end_with_done_twice(cluster: Cluster):
    async def one(http: httpx.AsyncClient, i: int) -> str:
        async with http.stream("POST", "/v1/completions", json=body([i + 1, 9], 30)) as response:
            assert response.status_code == 200
            return "".join([text async for text in response.aiter_text()])

    async def scenario() -> list[str]:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as http:
            first = await asyncio.gather(*(one(http, i) for i in range(64)))
            return first + await asyncio.gather(*(one(http, i) for i in range(64)))

    for text in asyncio.run(scenario()):
        assert text.rstrip().endswith("data: [DONE]")
        assert '"finish_reason":"length"' in text
        assert '"error"' not in text


def test_many_prompts_in_one_request_start_at_once(cluster: Cluster):
    """Serve gives calls made for one HTTP request one id, and mixes up those that are under way together."""
    prompts = [[i + 1, 9] for i in range(32)]
    began_s = time.monotonic()
    answer = httpx.post(f"{cluster.url}/v1/completions", json={**body(prompts, 5), "stream": False}, timeout=60)
    assert answer.status_code == 200
    assert [choice["index"] for choice in answer.json()["choices"]] == list(range(32))
    assert time.monotonic() - began_s < TIMEOUTS.stall_s


def test_a_closed_connection_frees_everything_within_two_seconds(cluster: Cluster):
    def totals() -> tuple[float, float]:
        names = ("stallfree_num_requests_running", "stallfree_kv_blocks_used")
        running, used = (sum(gauges(cluster, name).values()) for name in names)
        return running, used

    async def leave_when_all_are_running() -> None:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as http:
            seen = asyncio.Barrier(17)

            async def one(i: int) -> None:
                async with http.stream("POST", "/v1/completions", json=body([i + 1], 4000)) as response:
                    # Held on to: a text iterator that is collected closes the connection.
                    chunks = response.aiter_text()
                    await anext(chunks)
                    await seen.wait()
                    await seen.wait()

            async with asyncio.TaskGroup() as streams:
                for i in range(16):
                    streams.create_task(one(i))
                await seen.wait()
                await asyncio.to_thread(wait_until, lambda: totals() == (16, 16), 3.0)
                await seen.wait()

    asyncio.run(leave_when_all_are_running())
    wait_until(lambda: totals() == (0, 0), 2.0)


def test_cancelling_a_stream_is_seen_by_its_worker_within_half_a_second(cluster: Cluster):
    client = cluster.client()

    async def num_running(replica_id: str, name: str) -> int:
        pinned = cluster.worker.options(method_name="generate", stream=True, _by_reference=False)
        response = pinned.remote(request(name, [2], 3), target_replica=replica_id)
        frames = [frame async for frames in response for frame in frames]
        assert frames[0].replica_id == replica_id
        return next(frame.load.num_running for frame in frames if isinstance(frame, Tokens))

    async def scenario() -> tuple[int, int]:
        stream: AsyncIterator[list[Frame]] = client.generate(request("endless", [1], ENDLESS))
        accepted = (await anext(stream))[0]
        assert isinstance(accepted, Accepted)
        before = await num_running(accepted.replica_id, "probe-1")
        await stream.aclose()
        await asyncio.sleep(0.5)
        return before, await num_running(accepted.replica_id, "probe-2")

    assert asyncio.run(scenario()) == (2, 1)


def test_finish_reaches_the_worker_that_holds_the_request(cluster: Cluster):
    client = cluster.client()

    async def scenario() -> list[Frame]:
        seen: list[Frame] = []
        async for frames in client.generate(request("stop-me", [6], ENDLESS)):
            if not tokens_of(seen) and tokens_of(frames):
                await client.finish("stop-me", 0, 1)
            seen += frames
        await client.finish("stop-me", 0, 1)
        await client.abort("stop-me")
        return seen

    last = asyncio.run(scenario())[-1]
    assert isinstance(last, Tokens)
    assert last.events[-1].finish_reason == "stop"


def test_a_request_that_can_never_fit_is_refused_and_the_next_one_served(cluster: Cluster):
    with pytest.raises(RequestRejectedError, match="never fit"):
        asyncio.run(frames_of(cluster.client(), request("big", [NEVER_FITS], 3)))
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body([5], 3, stream=False))
    assert answer.json()["usage"]["completion_tokens"] == 3


def test_a_long_step_ends_well_and_no_worker_is_replaced(cluster: Cluster):
    frames = asyncio.run(frames_of(cluster.client(), request("slow", [HANG], 1)))
    assert tokens_of(frames) == expected_tokens([HANG], 1)
    assert HANG_S > 1.0
    assert all(up == 1.0 for up in gauges(cluster, "stallfree_worker_up").values())


def test_metrics_agree_on_both_ports(cluster: Cluster):
    own = httpx.get(f"http://127.0.0.1:{cluster.args.metrics_port}/metrics").text
    for text in (own, httpx.get(f"{cluster.url}/metrics").text):
        assert 'stallfree_worker_up{model="tiny",worker="0"} 1.0' in text
        assert 'stallfree_worker_up{model="tiny",worker="1"} 1.0' in text
        assert 'stallfree_requests_total{finish_reason="length",model="tiny"}' in text


async def until_token(stream: AsyncIterator[list[Frame]]) -> list[Frame]:
    frames = await anext(stream)
    while not tokens_of(frames):
        frames += await anext(stream)
    return frames


def pids_by_replica(cluster: Cluster) -> dict[str, int]:
    async def scenario() -> dict[str, int]:
        found: dict[str, int] = {}
        for number in count():
            if len(found) == cluster.args.num_workers:
                break
            frames = await frames_of(cluster.client(), request(f"who-{number}", [PID], 1))
            assert isinstance(frames[0], Accepted)
            found[frames[0].replica_id] = tokens_of(frames)[0]
        return found

    return asyncio.run(scenario())


def test_one_worker_that_hangs_leaves_the_server_ready_whichever_it_is(cluster: Cluster):
    wait_until(lambda: num_running_workers() == 2, 20.0)
    for _, pid in sorted(pids_by_replica(cluster).items()):
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(1.1 * KEEP_S)  # an older answer is not repeated
            began_s = time.monotonic()
            assert httpx.get(f"{cluster.url}/ready", timeout=10).status_code == 200
            assert time.monotonic() - began_s < ANSWER_TIMEOUT_S / 2
        finally:
            os.kill(pid, signal.SIGCONT)
    assert num_running_workers() == 2


def test_a_stream_whose_worker_is_killed_goes_on_elsewhere_without_a_trace(cluster: Cluster):
    reasons: list[str] = []
    client = cluster.failover_client(TIMEOUTS, reasons)
    num_tokens = 300
    asked = EngineRequest("victim", [PID], SamplingParams(max_tokens=num_tokens, n=2))

    async def scenario() -> tuple[list[Frame], float]:
        stream = client.generate(asked)
        frames = await until_token(stream)
        spared = asyncio.create_task(frames_of(client, request("spared", [8], 200)))
        await asyncio.sleep(0.3)
        os.kill(tokens_of(frames)[0], signal.SIGKILL)
        longest_gap_s, last_s = 0.0, time.monotonic()
        async for batch in stream:
            longest_gap_s, last_s = max(longest_gap_s, time.monotonic() - last_s), time.monotonic()
            frames += batch
        assert tokens_of(await spared) == expected_tokens([8], 200)
        return frames, longest_gap_s

    frames, longest_gap_s = asyncio.run(scenario())
    assert reasons == ["died"] or reasons == ["died"] * 2  # the spared one may have been there, too
    assert sum(isinstance(frame, Accepted) for frame in frames) == 1
    for index in range(2):
        # The first token of all is the process id.
        assert tokens_of(frames, index)[1:] == expected_tokens([PID], num_tokens, index)[1:]
    assert longest_gap_s < 2.0
    wait_until(lambda: num_running_workers() == 2, 20.0)
    assert len(tokens_of(asyncio.run(frames_of(client, request("after", [2], 5))))) == 5


def test_http_streams_go_on_when_engine_after_engine_dies(cluster: Cluster):
    whole = httpx.post(f"{cluster.url}/v1/completions", json=body([7], 400, stream=False), timeout=60).json()
    text = ""
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body([7], 400), timeout=30) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        text += next(lines)
        # Both workers, since either may run the stream.
        for name in ("fatal-1", "fatal-2"):
            with pytest.raises(WorkerLostError, match="told to die"):
                asyncio.run(frames_of(cluster.client(), request(name, [DIE], 5)))
            time.sleep(0.5)
        text += "".join(lines)
    chunks = [json.loads(part) for part in text.split("data: ") if part.startswith("{")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert text.endswith("[DONE]")
    assert sum(gauges(cluster, "stallfree_failovers_total").values()) >= 1
    # Asked at once: without any running worker that is 503, which says when to ask again.
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body([5], 3, stream=False), timeout=30)
    deadline_s = time.monotonic() + 30
    while answer.status_code == 503 and time.monotonic() < deadline_s:
        assert answer.json()["error"]["code"] == "worker_unavailable"
        time.sleep(int(answer.headers["retry-after"]))
        answer = httpx.post(f"{cluster.url}/v1/completions", json=body([5], 3, stream=False), timeout=30)
    assert answer.json()["usage"]["completion_tokens"] == 3


def test_a_request_that_kills_its_workers_is_given_up_after_two(cluster: Cluster):
    wait_until(lambda: num_running_workers() == 2, 20.0)
    reasons: list[str] = []
    client = cluster.failover_client(TIMEOUTS, reasons)
    with pytest.raises(WorkerFailedError, match="2 workers died"):
        asyncio.run(frames_of(client, request("poison", [DIE], 5)))
    assert reasons == ["died", "died"]
    wait_until(lambda: num_running_workers() == 2, 20.0)


def test_a_stream_of_a_frozen_worker_goes_on_elsewhere_and_its_old_work_ends(cluster: Cluster):
    wait_until(lambda: num_running_workers() == 2, 20.0)
    reasons: list[str] = []
    client = cluster.failover_client(ClientTimeouts(accept_s=10, stall_s=1, step_s=60), reasons)

    async def scenario() -> tuple[list[Frame], list[list[Frame]]]:
        stream = client.generate(request("frozen", [PID], 200))
        frames = await until_token(stream)
        pid = tokens_of(frames)[0]
        os.kill(pid, signal.SIGSTOP)
        try:
            frames += await asyncio.wait_for(rest_of(stream), 8.0)
            answers = [frames_of(client, request(f"meanwhile-{i}", [i + 1], 20)) for i in range(8)]
            return frames, await asyncio.wait_for(asyncio.gather(*answers), 5.0)
        finally:
            os.kill(pid, signal.SIGCONT)

    frames, others = asyncio.run(scenario())
    assert tokens_of(frames)[1:] == expected_tokens([PID], 200)[1:]
    assert reasons == ["stalled"]
    for i, other in enumerate(others):
        assert tokens_of(other) == expected_tokens([i + 1], 20)
    assert num_running_workers() == 2
    # What the frozen worker still held of the request is dropped when it comes back.
    wait_until(lambda: sum(gauges(cluster, "stallfree_num_requests_running").values()) == 0, 5.0)


@pytest.mark.slow
def test_connections_cut_while_a_worker_comes_back_and_another_is_replaced_leave_nothing_running(cluster: Cluster):
    wait_until(lambda: num_running_workers() == 2, 20.0)
    frozen, killed = pids_by_replica(cluster).values()

    async def cut(http: httpx.AsyncClient, after_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(after_s):
                async with http.stream("POST", "/v1/completions", json=body([7], 4000)) as response:
                    async for _ in response.aiter_text():
                        pass

    async def cut_many(http: httpx.AsyncClient) -> None:
        await asyncio.gather(*(cut(http, i % 40 / 1000 if i % 4 else 0.3 + i / 100) for i in range(100)))

    async def scenario() -> None:
        async with httpx.AsyncClient(
            base_url=cluster.url, timeout=60, limits=httpx.Limits(max_connections=None)
        ) as http:
            os.kill(frozen, signal.SIGSTOP)
            try:
                await cut_many(http)
            finally:
                os.kill(frozen, signal.SIGCONT)
            await cut_many(http)
            os.kill(killed, signal.SIGKILL)
            await cut_many(http)
            while num_running_workers() == 2:  # until Serve has seen it
                await cut_many(http)
            while num_running_workers() < 2:
                await cut_many(http)
            await cut_many(http)

    asyncio.run(scenario())
    for name in ("stallfree_num_requests_running", "stallfree_kv_blocks_used"):
        wait_until(lambda: sum(gauges(cluster, name).values()) == 0, 5.0)  # noqa: B023


@pytest.mark.slow
def test_a_redeploy_hands_over_every_stream_that_does_not_end_in_time(cluster: Cluster):
    reasons: list[str] = []
    client = cluster.failover_client(ClientTimeouts(20, 5, 60, drain_grace_s=0.3), reasons)

    async def scenario() -> list[list[Frame]]:
        streams = [asyncio.create_task(frames_of(client, request(f"s{i}", [i + 1], 1000))) for i in range(8)]
        await asyncio.sleep(0.5)
        app = build_with_engine(cluster.args, "tests.fake_engine:build")
        await asyncio.to_thread(cluster.running.deploy, app, "127.0.0.1", cluster.port)
        return await asyncio.gather(*streams)

    for i, frames in enumerate(asyncio.run(scenario())):
        assert tokens_of(frames) == expected_tokens([i + 1], 1000)
    assert set(reasons) <= {"drained", "died"}
    assert reasons.count("drained") >= 4


def test_a_start_that_fails_says_why_in_one_line(cluster: Cluster):
    with pytest.raises(StartError, match=r"^RuntimeError: this engine cannot be built$"):
        cluster.running.deploy(
            build_with_engine(cluster.args, "tests.fake_engine:build_that_fails"), "127.0.0.1", cluster.port
        )


def num_running_workers() -> int:
    return serve.status().applications[APP_NAME].deployments[WORKER_NAME].replica_states.get("RUNNING", 0)
