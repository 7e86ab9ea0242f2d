"""A small OpenAI-compatible server on loopback: streams words at a pace, and can be strict, slow or broken."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class FakeServer:
    """`unknown_fields` are refused with a 400, as strict servers do. `break_after` closes a stream after so many
    tokens, `error_after` puts an error event there, `stop_after` ends the answer as an end token would. A server that
    does not say `[DONE]` ends its streams with the finish reason. `silent_at` takes requests to this path and never
    answers; `usage` is what it says instead of what it counted; text is `tokens_per_word` tokens a word."""

    gap_s: float = 0.002
    unknown_fields: frozenset[str] = frozenset()
    takes_token_ids: bool = True
    break_after: int | None = None
    error_after: int | None = None
    stop_after: int | None = None
    says_done: bool = True
    models: list[str] = field(default_factory=lambda: ["fake"])
    bodies: list[dict[str, Any]] = field(default_factory=list)
    num_cancelled: int = 0
    status: int = 200
    silent_at: str | None = None
    usage: Any = None
    tokens_per_word: int = 1

    async def list_models(self, request: web.Request) -> web.Response:
        await self._answer(request)
        return web.json_response({"data": [{"id": name} for name in self.models]})

    async def _answer(self, request: web.Request) -> None:
        if request.path == self.silent_at:
            await asyncio.Event().wait()

    async def complete(self, request: web.Request) -> web.StreamResponse:
        await self._answer(request)
        body = await request.json()
        self.bodies.append(body)
        unknown = self.unknown_fields & set(body)
        if unknown or (not self.takes_token_ids and isinstance(body["prompt"], list)):
            return web.json_response({"error": {"message": f"unknown {sorted(unknown)}"}}, status=400)
        if self.status != 200:
            return web.Response(text="out of order", status=self.status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            await self._stream(response, body)
        except (ConnectionResetError, asyncio.CancelledError):
            self.num_cancelled += 1
            raise
        return response

    async def _stream(self, response: web.StreamResponse, body: dict[str, Any]) -> None:
        async def send(value: Any) -> None:
            data = value if isinstance(value, str) else json.dumps(value)
            await response.write(f"data: {data}\n\n".encode())

        num_tokens = body["max_tokens"] if self.stop_after is None else min(self.stop_after, body["max_tokens"])
        for number in range(num_tokens):
            await asyncio.sleep(self.gap_s)
            if number == self.error_after:
                await send({"error": {"message": "the worker died"}})
                return
            if number == self.break_after:
                return
            await send({"choices": [{"index": 0, "text": f" w{number}", "finish_reason": None}]})
        finish_reason = "length" if num_tokens == body["max_tokens"] else "stop"
        await send({"choices": [{"index": 0, "text": "", "finish_reason": finish_reason}]})
        if "stream_options" in body:
            prompt = body["prompt"]
            num_in = self.tokens_per_word * len(prompt.split()) if isinstance(prompt, str) else len(prompt)
            counted = {"prompt_tokens": num_in, "completion_tokens": num_tokens}
            await send({"choices": [], "usage": self.usage or counted})
        if self.says_done:
            await send("[DONE]")


async def serving_at(server: FakeServer, port: int) -> None:
    """Until it is cancelled or its process ends."""
    async with serving(server, port):
        await asyncio.Event().wait()


@asynccontextmanager
async def serving(server: FakeServer, port: int = 0) -> AsyncIterator[str]:
    """Its base URL."""
    app = web.Application()
    app.router.add_get("/v1/models", server.list_models)
    app.router.add_post("/v1/completions", server.complete)
    runner = web.AppRunner(app, shutdown_timeout=1.0, handler_cancellation=True)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
