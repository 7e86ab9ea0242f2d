"""Structured answers over HTTP, and hostile grammars beside a stream that goes on."""

import asyncio
import json
import time

import httpx
import jsonschema
import pytest

from tests.end_to_end.asking import client
from tests.end_to_end.configuration import MODEL
from tests.server_process import ServerProcess
from tests.structured.schemas import HOSTILE, SCHEMAS

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.model]

FIELDS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}
REFUSED = ("30 patterns at once", "nested 200 deep", "nested 100,000 deep", "enum of 200,000", "groups 50,000 deep")


def test_a_schema_is_followed_streamed_or_not(server: ServerProcess) -> None:
    schema, question = SCHEMAS["array_of_objects"]
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 200,
        "seed": 1,
        "response_format": {"type": "json_schema", "json_schema": {"name": "basket", "schema": schema}},
    }
    url = f"{server.url}/v1/chat/completions"
    choice = httpx.post(url, json=body, timeout=120).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), schema)
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=120) as response:
        data = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    deltas = [json.loads(item)["choices"][0]["delta"].get("content") or "" for item in data[:-1]]
    assert "".join(deltas) == choice["message"]["content"]


def test_hostile_grammars_are_refused_in_five_seconds_while_a_stream_goes_on(server: ServerProcess) -> None:
    async def work() -> tuple[list[tuple[int, float]], list[float]]:
        async with client(server.url) as http:
            body = {"model": MODEL, "prompt": "A story:", "max_tokens": 1500, "ignore_eos": True, "stream": True}
            gaps_s: list[float] = []
            has_begun, is_over = asyncio.Event(), asyncio.Event()

            async def read() -> None:
                async with http.stream("POST", "/v1/completions", json=body) as response:
                    last_s = time.monotonic()
                    async for line in response.aiter_lines():
                        if line:
                            gaps_s.append(time.monotonic() - last_s)
                            last_s = time.monotonic()
                            has_begun.set()
                        if is_over.is_set():
                            return

            reader = asyncio.create_task(read())
            await has_begun.wait()
            gaps_s.clear()
            results = []
            for name in REFUSED:
                kind, text = HOSTILE[name]
                began_s = time.monotonic()
                response = await http.post(
                    "/v1/completions",
                    json={"model": MODEL, "prompt": "a", "structured_outputs": {FIELDS[kind]: text}},
                )
                results.append((response.status_code, time.monotonic() - began_s))
            is_over.set()
            await reader
            return results, gaps_s

    results, gaps_s = asyncio.run(work())
    assert [status for status, _ in results] == [400] * len(REFUSED)
    assert max(took_s for _, took_s in results) < 5.0
    assert len(gaps_s) > 10
    assert max(gaps_s) < 2.0, "the stream stood still"
