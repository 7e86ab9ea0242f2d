"""The benchmark against this project's own API over real HTTP: it understands everything that the benchmark says."""

import asyncio
import contextlib
import socket
from typing import Any

import uvicorn

from deployments.bench.driver import drive
from deployments.bench.http_target import Dialect, HttpTarget
from deployments.bench.prompts import PromptMaker
from deployments.bench.requests import Answer, PlannedRequest
from tests.api_client import Api, answering


def measured(api: Api, plan: list[PlannedRequest]) -> tuple[Dialect, list[Answer]]:
    async def body() -> Any:
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            server = uvicorn.Server(uvicorn.Config(api.app, log_level="warning", lifespan="off"))
            serving = asyncio.create_task(server.serve(sockets=[listening]))
            prompts = PromptMaker(api.tokenizer.vocab_size, 0, 512)
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            target = HttpTarget(url, prompts, model=None, text=False, api_key=None)
            try:
                while not server.started:
                    await asyncio.sleep(0.01)
                await target.open()
                run = await drive(target, plan, run_number=1, timeout_s=30.0)
            finally:
                await target.close()
                server.should_exit = True
                with contextlib.suppress(asyncio.CancelledError):
                    await serving
        return target.dialect, run.answers

    return asyncio.run(asyncio.wait_for(body(), 60.0))


def test_it_takes_token_ids_and_ignore_eos_and_counts_by_usage() -> None:
    api = answering("the cat sat on the mat")
    plan = [PlannedRequest(number, 0.01 * number, 7, 4) for number in range(5)]
    dialect, answers = measured(api, plan)
    assert dialect == Dialect(token_ids=True, ignore_eos=True, usage=True)
    for answer in answers:
        assert answer.error is None
        assert (answer.num_input_tokens, answer.num_output_tokens) == (7, 4)
        assert answer.delivery_times_s


def test_a_prompt_that_never_fits_is_a_failed_request_with_the_servers_words() -> None:
    _, answers = measured(answering("the"), [PlannedRequest(0, 0.0, 500, 4)])
    assert answers[0].error is not None
    assert "HTTP 400" in answers[0].error
    assert "500" in answers[0].error
