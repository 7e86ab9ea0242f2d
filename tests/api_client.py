"""The HTTP API in process: the application over a fake worker, asked over ASGI."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import httpx
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts

from deployments.api import ApiService, ApiSettings, create_api
from deployments.request_log import NO_LOG, RequestLog
from tests.fake_worker import CountedMetrics, FakeWorker
from tests.no_dashboard import NoDashboard
from tests.tiny_tokenizers import folder_of, tokenizer_of
from worker.text import Tokenizer

MODEL = "tiny"
MAX_MODEL_LEN = 64
BASE_URL = "http://api"


@dataclass
class Api:
    worker: FakeWorker
    kind: str = "byte_level"
    metrics: CountedMetrics = field(default_factory=CountedMetrics)
    settings: dict[str, Any] = field(default_factory=dict)
    is_ready: bool = True
    cors_origins: tuple[str, ...] = ()
    chat_template: str | None = None
    are_workers_running: bool = True
    request_log: RequestLog = NO_LOG

    def __post_init__(self) -> None:
        self.tokenizer = tokenizer_of(self.kind)
        if self.chat_template is not None:
            self.tokenizer = Tokenizer(folder_of(self.kind), self.chat_template)
        settings = {"max_model_len": MAX_MODEL_LEN, "vocab_size": self.tokenizer.vocab_size} | self.settings
        self.app = create_api(self.cors_origins)
        self.service = self.app.state.service = ApiService(
            self.worker,
            self.tokenizer,
            ApiSettings(served_model_name=MODEL, **settings),
            self.metrics,
            is_ready=self._is_ready,
            metrics_text=self._metrics_text,
            dashboard=NoDashboard(),
            is_any_worker=lambda: self.are_workers_running,
            request_log=self.request_log,
        )

    async def _is_ready(self) -> bool:
        return self.is_ready

    async def _metrics_text(self) -> str:
        return "# HELP a b\n"

    def transport(self) -> httpx.ASGITransport:
        return httpx.ASGITransport(self.app, raise_app_exceptions=False)

    def run(self, work: Callable[[httpx.AsyncClient], Coroutine[Any, Any, Any]]) -> Any:
        async def main() -> Any:
            async with httpx.AsyncClient(transport=self.transport(), base_url=BASE_URL) as client:
                return await work(client)

        return asyncio.run(main())

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return self.run(lambda client: client.get(path, **kwargs))

    def post(self, path: str, **kwargs: Any) -> httpx.Response:
        return self.run(lambda client: client.post(path, **kwargs))

    def request(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        return self.run(lambda client: client.request(method, path, **kwargs))

    def complete(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", json={"model": MODEL, "prompt": "the cat", **fields})

    def complete_with(self, headers: dict[str, str], **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", json={"model": MODEL, "prompt": "the cat", **fields}, headers=headers)

    def chat(self, **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "the cat"}]
        return self.post("/v1/chat/completions", json={"model": MODEL, "messages": messages, **fields})


def answering(text: str, kind: str = "byte_level", settings: dict[str, Any] | None = None, **worker: Any) -> Api:
    """An API whose worker answers with `text`, then the end-of-sequence token."""
    tokenizer = tokenizer_of(kind)
    ids = [token_id for token_id in tokenizer.encode(text) if token_id not in tokenizer.special_ids]
    fake = FakeWorker(answer_ids=ids, stop_token_id=tokenizer.eos_token_id, **worker)
    return Api(fake, kind, settings=settings or {})


def routes_of(app: FastAPI) -> list[tuple[str, str]]:
    """(method, path) of every route, whether it is documented or not."""
    return [
        (method, route.path_format)
        for route in iter_route_contexts(app.routes)
        for method in sorted(route.methods or ())
        if method != "HEAD"
    ]


def stream_events(response: httpx.Response) -> list[Any]:
    """The data of each event, parsed; `[DONE]` as it is."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in response.text.split("\n\n")[:-1]:
        assert block.startswith("data: ")
        data = block.removeprefix("data: ")
        events.append(data if data == "[DONE]" else json.loads(data))
    return events
