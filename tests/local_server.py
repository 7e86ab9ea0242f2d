"""The HTTP API over a real engine in this process: no Ray, one worker, a port of its own."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import uvicorn

from deployments.api import ApiService, ApiSettings, create_api
from deployments.frames import Frame
from deployments.worker_service import WorkerService
from tests.fake_worker import CountedMetrics
from tests.no_dashboard import NoDashboard
from tests.server_process import free_port
from worker.config import EngineConfig
from worker.engine import Engine
from worker.engine_loop import EngineLoop
from worker.text import Tokenizer
from worker.types import EngineRequest

MODEL_NAME = "local"
STEP_TIMEOUT_S = 60.0
START_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class LocalServer:
    url: str
    engine: Engine


class _LocalClient:
    """`WorkerClient` over a service of the same event loop."""

    def __init__(self, service: WorkerService) -> None:
        self._service = service

    def generate(self, request: EngineRequest) -> AsyncIterator[list[Frame]]:
        return self._service.generate(request)

    async def finish(self, request_id: str, index: int, num_tokens: int) -> None:
        self._service.finish(request_id, index, num_tokens)

    async def abort(self, request_id: str) -> None:
        self._service.abort(request_id)


@contextlib.contextmanager
def serving_in_process(config: EngineConfig) -> Iterator[LocalServer]:
    engine = Engine(config)
    port = free_port()
    server = uvicorn.Server(uvicorn.Config("", host="127.0.0.1", port=port, log_level="warning"))
    failures: list[BaseException] = []

    async def serve() -> None:
        service = WorkerService(0, "local", STEP_TIMEOUT_S, lambda: setattr(server, "should_exit", True))
        service.start(EngineLoop(engine, service.deliver, service.on_death), engine.block_size)
        api = create_api()
        api.state.service = ApiService(
            _LocalClient(service),
            Tokenizer(engine.tokenizer_folder),
            ApiSettings(MODEL_NAME, engine.max_model_len, engine.vocab_size, engine.generation_defaults),
            CountedMetrics(),
            is_ready=_yes,
            metrics_text=_nothing,
            dashboard=NoDashboard(),
        )
        server.config.app = api
        await server.serve()
        await service.stop(STEP_TIMEOUT_S)

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="local-server")
    thread.start()
    try:
        _wait_for(server, thread)
        yield LocalServer(f"http://127.0.0.1:{port}", engine)
    finally:
        server.should_exit = True
        thread.join(START_TIMEOUT_S)
    assert not failures, failures
    assert not thread.is_alive()


def _wait_for(server: uvicorn.Server, thread: threading.Thread) -> None:
    waited = threading.Event()
    for _ in range(int(START_TIMEOUT_S / 0.05)):
        if server.started:
            return
        assert thread.is_alive(), "the server did not start"
        waited.wait(0.05)
    raise TimeoutError(f"the server did not start within {START_TIMEOUT_S:g} s")


async def _yes() -> bool:
    return True


async def _nothing() -> str:
    return ""
