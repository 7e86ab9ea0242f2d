"""Requests that are meant to hurt: bodies without end, counts without bound, values that want to be labels."""

import asyncio
import json
import re
import socket
import time
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from monitoring.ingress_metrics import IngressMetrics
from tests.api_client import MODEL, Api, answering

ROOT = Path(__file__).parent.parent
MIB = 1024 * 1024
BODY_BYTES = 100 * 1000 * 1000
PIECE = b"a" * 65536
#: between two answers of a probe, on a machine that does other things too
MOST_SILENCE_S = 2.0


@asynccontextmanager
async def listening(api: Api) -> AsyncIterator[int]:
    """The port of the API on a real socket, in this event loop."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(api.app, log_level="warning", lifespan="off"))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            await task


async def status_of(port: int, head: str, pieces: AsyncIterator[bytes] | None = None) -> int:
    """Sends until it is answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = asyncio.create_task(reader.readline())
    try:
        writer.write(head.replace("\n", "\r\n").encode() + b"\r\n")
        try:
            async for piece in pieces or _nothing():
                writer.write(piece)
                await writer.drain()
                if answer.done():
                    break
        except ConnectionError:
            pass  # answered and closed while we were sending
        return int((await asyncio.wait_for(answer, 10)).split()[1])
    finally:
        answer.cancel()
        writer.close()


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield b""


async def _chunks() -> AsyncIterator[bytes]:
    start = json.dumps({"model": MODEL, "prompt": "a"}).encode()[:-2]
    for piece in (start, *([PIECE] * (BODY_BYTES // len(PIECE)))):
        yield b"%x\r\n%s\r\n" % (len(piece), piece)
        await asyncio.sleep(0)


async def longest_silence_s(port: int, stop: asyncio.Event) -> float:
    longest_s, last_s = 0.0, time.monotonic()
    while not stop.is_set():
        assert await status_of(port, "GET /health HTTP/1.1\nHost: api\nConnection: close\n") == 200
        now_s = time.monotonic()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
        await asyncio.sleep(0.01)
    return longest_s


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/tokenize"])
@pytest.mark.parametrize("is_announced", [True, False])
def test_a_body_of_100_mb_is_refused_at_once_and_probes_are_answered_meanwhile(path: str, is_announced: bool) -> None:
    api = answering("the")
    length = f"Content-Length: {BODY_BYTES}" if is_announced else "Transfer-Encoding: chunked"
    head = f"POST {path} HTTP/1.1\nHost: api\nContent-Type: application/json\n{length}\n"

    async def main() -> None:
        async with listening(api) as port:
            stop = asyncio.Event()
            probe = asyncio.create_task(longest_silence_s(port, stop))
            began_s = time.monotonic()
            # Of the announced body not one byte is sent: the answer does not wait for it.
            status = await status_of(port, head, None if is_announced else _chunks())
            took_s = time.monotonic() - began_s
            stop.set()
            assert status == 413
            assert took_s < 5.0
            assert await probe < MOST_SILENCE_S

    tracemalloc.start()
    try:
        asyncio.run(main())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # What was read of it up to the limit, and no more.
    assert peak < 5 * api.service.settings.max_body_bytes
    assert not api.worker.requests


HOSTILE: list[tuple[str, dict[str, Any]]] = [
    ("n", {"n": 1_000_000}),
    ("n", {"n": 10**18}),
    ("best_of", {"best_of": 1_000_000}),
    ("beam_width", {"use_beam_search": True, "beam_width": 1_000_000}),
    ("beam_width", {"use_beam_search": True, "beam_width": 10**18}),
    ("stop", {"stop": ["x"] * 100_000}),
    ("stop[0]", {"stop": ["x" * 1_000_000]}),
    ("stop_token_ids", {"stop_token_ids": [1] * 100_000}),
    ("logit_bias", {"logit_bias": {str(token_id): 1 for token_id in range(50_000)}}),
    ("seed", {"seed": 10**30}),
    ("top_k", {"top_k": 10**30}),
    ("max_tokens", {"max_tokens": 10**18}),
    ("min_tokens", {"min_tokens": 10**18}),
    ("cache_salt", {"cache_salt": "x" * 100_000}),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("route", "param", "fields"),
    [
        *((route, *case) for route in ("completions", "chat/completions") for case in HOSTILE),
        ("completions", "logprobs", {"logprobs": 21}),
        ("completions", "logprobs", {"logprobs": 10**18}),
        ("chat/completions", "top_logprobs", {"logprobs": True, "top_logprobs": 21}),
        ("completions", "prompt", {"prompt": ["x"] * 100_000}),
        ("completions", "n", {"prompt": ["x"] * 60, "n": 60}),
        ("chat/completions", "messages", {"messages": [{"role": "user", "content": "x"}] * 100_000}),
    ],
)
def test_a_count_without_bound_is_refused_before_anything_is_made(
    route: str, param: str, fields: dict[str, Any], stream: bool
) -> None:
    api = answering("the")
    text = {"prompt": "a"} if route == "completions" else {"messages": [{"role": "user", "content": "a"}]}
    body = json.dumps({"model": MODEL, **text, "stream": stream, **fields}).encode()
    tracemalloc.start()
    try:
        response = api.post(f"/v1/{route}", content=body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert not api.worker.requests
    # A few times the body, which is parsed; not a million of anything.
    assert peak < 2 * MIB + 60 * len(body)
    assert api.complete().status_code == 200


@pytest.mark.parametrize(
    ("field", "number"),
    [
        ("max_tokens", "9" * 5000),
        ("max_tokens", "-" + "9" * 5000),
        ("max_tokens", "9" * 4300),
        ("seed", "1" + "0" * 308),
        ("unknown", "9" * 5000),
        ("temperature", "1e999"),
        ("temperature", "-1e999"),
        ("temperature", "1" * 220 + "e99"),
        ("logit_bias.5", "1e400"),
    ],
)
def test_a_number_that_no_double_holds_is_refused_by_the_name_of_its_field(field: str, number: str) -> None:
    api = answering("the")
    value = f'{{"5": {number}}}' if "." in field else number
    body = f'{{"model": "{MODEL}", "prompt": "a", "{field.partition(".")[0]}": {value}}}'
    response = api.post("/v1/completions", content=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field)
    what = "is larger than a double can be" if "e" in number else "has more than 308 digits"
    assert error["message"] == f"{field}: the number {what}"
    assert not api.worker.requests


def test_digits_in_texts_are_no_number_and_what_is_no_json_number_is_refused() -> None:
    api = answering("the", settings={"max_model_len": 16384})
    assert api.complete(prompt="9" * 5000 + " 1e999").status_code == 200
    for constant in ("NaN", "Infinity", "-Infinity"):
        refused = api.post("/v1/completions", content=f'{{"model": "{MODEL}", "prompt": "a", "x": {constant}}}')
        assert (refused.status_code, refused.json()["error"]["message"]) == (400, "the body is not valid JSON")


def test_nothing_that_a_client_sends_becomes_a_label() -> None:
    metrics = IngressMetrics(MODEL)
    api = answering("the cat")
    api = Api(api.worker, settings={"tenant_header": "x-team"}, metrics=metrics)  # type: ignore[arg-type]
    mark = "odd-4711"
    for fields in ({}, {"model": mark}, {"user": mark}, {"cache_salt": mark}, {mark: 1}, {"n": 0}):
        api.complete_with({"x-team": mark, "x-request-id": mark, "user-agent": mark}, **fields)
        api.chat(**fields, metadata={mark: mark})
    api.get(f"/{mark}")
    assert mark not in json.dumps(metrics.snapshot())
    assert sum(metrics.snapshot()["counters"]["stallfree_requests_total"].values()) > 0


def test_nothing_from_the_network_is_unpickled() -> None:
    """Ray's own channels between its processes aside, nothing here reads pickles."""
    unpickling = re.compile(r"\b(?:cloud)?pickle\b|\bmarshal\b|\bshelve\b|\bdill\b|\bnumpy\.load\b|\bnp\.load\b")
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for package in ("kv_cache", "scheduler", "worker", "monitoring", "deployments")
        for path in (ROOT / package).rglob("*.py")
        for line in path.read_text().splitlines()
        if unpickling.search(line.split("#")[0]) and re.search(r"import|\.loads?\(", line)
    ]
    assert found == []
