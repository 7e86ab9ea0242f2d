"""The HTTP API over real engines of integers in this process: failover and explanations as they are served, no Ray."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch

from deployments.api import ApiService, ApiSettings, create_api
from deployments.explain.desk import ExplainDesk, no_others
from deployments.explain.journeys import Journeys
from deployments.failover import FailoverClient
from deployments.frames import Frame, Tokens
from deployments.keys import KeyRing
from deployments.worker_client import WorkerLostError
from deployments.worker_service import WorkerService
from scheduler.life_report import LifeReport
from tests.fake_worker import CountedMetrics
from tests.no_dashboard import NoDashboard
from tests.paced_engine import PacedEngine
from worker.config import EngineConfig
from worker.engine_loop import EngineLoop
from worker.text import Tokenizer
from worker.types import EngineRequest

MODEL = "tiny"
BASE_URL = "http://api"


@dataclass
class Workers:
    """Implements `AttemptClient` over services of this event loop; the least busy one takes a request. Attempt k of a
    request is lost after `cuts[k]` frames with tokens."""

    services: list[WorkerService]
    cuts: dict[str, list[int]] = field(default_factory=dict)
    num_open: list[int] = field(default_factory=list)

    async def generate(self, request: EngineRequest, avoid: frozenset[str]) -> AsyncGenerator[list[Frame], None]:
        places = [place for place in range(len(self.services)) if str(place) not in avoid]
        place = min(places, key=self.num_open.__getitem__)
        self.num_open[place] += 1
        cuts = self.cuts.get("".join(map(chr, request.prompt_token_ids[:1])), [])
        attempt = int(request.request_id.partition("~")[2] or 0)
        num_frames = 0
        try:
            async with aclosing(self.services[place].generate(request)) as stream:  # type: ignore[type-var]
                async for frames in stream:
                    yield frames
                    num_frames += any(isinstance(frame, Tokens) for frame in frames)
                    if attempt < len(cuts) and num_frames >= cuts[attempt]:
                        raise WorkerLostError("lost, as planned", "died", str(place))
        finally:
            self.num_open[place] -= 1

    async def finish(self, request_id: str, index: int, num_tokens: int) -> None:
        for service in self.services:
            service.finish(request_id, index, num_tokens)

    async def abort(self, request_id: str) -> None:
        for service in self.services:
            service.abort(request_id)

    async def life(self, request_id: str, replica_id: str) -> LifeReport | None:
        return await self.services[int(replica_id)].life(request_id)


@dataclass
class ExplainedApi:
    http: httpx.AsyncClient
    workers: Workers
    #: by id of the answer, how long its client waited
    client_ms: dict[str, float] = field(default_factory=dict)

    async def complete(self, headers: dict[str, str] | None = None, **fields: Any) -> dict[str, Any]:
        body = {"model": MODEL, "temperature": 0, "ignore_eos": True, **fields}
        began_s = time.monotonic()
        response = await self.http.post("/v1/completions", json=body, headers=headers)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        self.client_ms[answer["id"]] = 1e3 * (time.monotonic() - began_s)
        return answer

    async def explain(self, request_id: str, headers: dict[str, str] | None = None) -> dict[str, Any]:
        response = await self.http.get(f"/v1/requests/{request_id}/explain", headers=headers)
        assert response.status_code == 200, response.text
        explanation: dict[str, Any] = response.json()
        return explanation


def run_explained(
    folder: Path,
    scenario: Callable[[ExplainedApi], Coroutine[Any, Any, None]],
    *,
    num_workers: int = 1,
    step_s: float = 0.005,
    keys: KeyRing | None = None,
    **options: Any,
) -> None:
    """`options` are the engines'."""
    torch.set_num_threads(1)

    async def main() -> None:
        services: list[WorkerService] = []
        for place in range(num_workers):
            engine = PacedEngine(EngineConfig(model=str(folder), **options), step_s)
            service = WorkerService(place, str(place), 60.0, lambda: None)
            service.start(EngineLoop(engine, service.deliver, service.on_death), engine.block_size)
            services.append(service)
        workers = Workers(services, num_open=[0] * num_workers)
        journeys = Journeys(workers.life)
        app = create_api(behind_serve=True)
        app.state.service = ApiService(
            FailoverClient(workers, 5.0, lambda reason: None, journeys),
            Tokenizer(folder),
            ApiSettings(MODEL, engine.max_model_len, engine.vocab_size, keys=keys),
            CountedMetrics(),
            is_ready=_yes,
            metrics_text=_nothing,
            dashboard=NoDashboard(),
            explain=ExplainDesk(journeys, no_others),
        )
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        try:
            async with httpx.AsyncClient(transport=transport, base_url=BASE_URL, timeout=60.0) as http:
                await scenario(ExplainedApi(http, workers))
        finally:
            for service in services:
                await service.stop(10.0)

    asyncio.run(main())


async def _yes() -> bool:
    return True


async def _nothing() -> str:
    return ""
