"""Streams as a client sees them: the tokens of each choice, when they came, and how the stream ended.

Plain HTTP over aiohttp, as light as it can be, since it shares the machine with the server. Knows no servers.
"""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

DONE = "done"


@dataclass
class Choice:
    """`tokens` where log-probabilities were asked for."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass
class Stream:
    """`end`: `done`, `broken`, `error: ...` (an event) or `status ...`. Times are monotonic seconds; `times_s` are
    those of chunks that brought text, and `chunk_chars` how much."""

    sent_s: float = 0.0
    response_id: str = ""
    end: str = "broken"
    status: int = 0
    retry_after: str | None = None
    times_s: list[float] = field(default_factory=list)
    chunk_chars: list[int] = field(default_factory=list)
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, int] | None = None

    @property
    def is_done(self) -> bool:
        return self.end == DONE

    @property
    def texts(self) -> list[str]:
        return [self.choices[index].text for index in sorted(self.choices)]

    @property
    def is_open(self) -> bool:
        return bool(self.response_id) and self.end == "broken"

    @property
    def ttft_s(self) -> float:
        return self.times_s[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Between chunks."""
        return [later - earlier for earlier, later in zip(self.times_s, self.times_s[1:], strict=False)]

    @property
    def largest_gap_s(self) -> float:
        """The wait for the first token counts."""
        return max([self.ttft_s, *self.gaps_s])

    def take(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.end = DONE
            return
        event = json.loads(data)
        if "error" in event:
            self.end = f"error: {event['error']['message']}"
            return
        self.response_id = event["id"]
        self.usage = event.get("usage") or self.usage
        for piece in event["choices"]:
            choice = self.choices.setdefault(piece["index"], Choice())
            choice.text += piece["text"]
            choice.finish_reason = piece["finish_reason"] or choice.finish_reason
            if piece.get("logprobs") is not None:
                choice.tokens += piece["logprobs"]["tokens"]
                choice.logprobs += piece["logprobs"]["token_logprobs"]
            if piece["text"]:
                self.times_s.append(time.monotonic())
                self.chunk_chars.append(len(piece["text"]))


def session(url: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        base_url=url, connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    )


async def ask(http: aiohttp.ClientSession, body: dict[str, Any], stream: Stream | None = None) -> Stream:
    """The whole stream; `stream` can be watched meanwhile. A connection that breaks is an end, too."""
    stream = Stream() if stream is None else stream
    stream.sent_s = time.monotonic()
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    try:
        async with http.post("/v1/completions", json=asked) as response:
            stream.status = response.status
            stream.retry_after = response.headers.get("Retry-After")
            if response.status != 200:
                stream.end = f"status {response.status}: {await response.text()}"
                return stream
            async for line in response.content:
                if line.startswith(b"data: "):
                    stream.take(line[6:].strip())
    except (aiohttp.ClientError, ConnectionError):
        stream.end = "broken" if stream.end == DONE else stream.end
    return stream


async def ask_all(url: str, bodies: list[dict[str, Any]], num_at_once: int | None = None) -> list[Stream]:
    """In order; at most `num_at_once` are under way."""
    gate = asyncio.Semaphore(num_at_once or len(bodies))

    async def one(http: aiohttp.ClientSession, body: dict[str, Any]) -> Stream:
        async with gate:
            return await ask(http, body)

    async with session(url) as http:
        return await asyncio.gather(*(one(http, body) for body in bodies))
