"""Requests and streams as plain HTTP: bodies, events, the text of an answer. Knows nothing of servers."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.end_to_end.configuration import MODEL

TIMEOUT_S = 120.0
#: long enough that nobody sees its end before leaving
MANY_TOKENS = 1500


def completion(prompt: str | list[int] | list[str], max_tokens: int, **fields: Any) -> dict[str, Any]:
    """A greedy one, unless told otherwise."""
    return {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **fields}


@dataclass
class Streamed:
    """What a completion stream brought, and how it ended: `done`, `error` (an event) or `broken`."""

    deltas: list[str] = field(default_factory=list)
    #: where log-probabilities were asked for
    tokens: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, int] | None = None
    end: str = "broken"

    @property
    def text(self) -> str:
        return "".join(self.deltas)

    def take(self, data: str) -> None:
        if data == "[DONE]":
            self.end = "done"
            return
        event = json.loads(data)
        if "error" in event:
            self.end = "error"
            return
        self.usage = event.get("usage") or self.usage
        for choice in event["choices"]:
            self.deltas.append(choice["text"])
            if choice["logprobs"] is not None:
                self.tokens += choice["logprobs"]["tokens"]
            self.finish_reason = choice["finish_reason"] or self.finish_reason


def client(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits)


async def data_lines(response: httpx.Response) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


async def streamed(http: httpx.AsyncClient, body: dict[str, Any]) -> Streamed:
    """The whole stream. A connection that breaks is an end, too."""
    seen = Streamed()
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    try:
        async with http.stream("POST", "/v1/completions", json=asked) as response:
            assert response.status_code == 200, await response.aread()
            async for data in data_lines(response):
                seen.take(data)
    except httpx.TransportError:
        seen.end = "broken"
    return seen


async def leave_after(http: httpx.AsyncClient, body: dict[str, Any], num_events: int) -> None:
    """Reads so many events of the stream, then closes the connection."""
    async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        lines = data_lines(response)
        for _ in range(num_events):
            await anext(lines)


async def all_streamed(url: str, bodies: list[dict[str, Any]]) -> list[Streamed]:
    """All at once."""
    async with client(url) as http:
        return await asyncio.gather(*(streamed(http, body) for body in bodies))
