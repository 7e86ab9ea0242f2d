"""The official client, checking every response against its own types."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import httpx2
import openai
import pytest

from tests.api_client import BASE_URL, MODEL, Api, answering

MESSAGES = [{"role": "user", "content": "hello"}]
TEXT = "the dog 😀 สวัสดี"


def ask(api: Api, work: Callable[[openai.AsyncOpenAI], Coroutine[Any, Any, Any]], *, strict: bool = True) -> Any:
    async def main() -> Any:
        async with openai.AsyncOpenAI(
            api_key="none",
            base_url=f"{BASE_URL}/v1",
            http_client=httpx2.AsyncClient(transport=httpx2.ASGITransport(api.app)),
            max_retries=0,
            _strict_response_validation=strict,
        ) as client:
            return await work(client)

    return asyncio.run(main())


def test_the_client_lists_models() -> None:
    async def work(client: openai.AsyncOpenAI) -> list[str]:
        return [model.id async for model in client.models.list()]

    assert ask(answering("the"), work) == [MODEL]


def test_the_client_chats() -> None:
    chat = ask(
        answering(TEXT),
        lambda client: client.chat.completions.create(model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=2),
    )
    assert chat.choices[0].message.content == TEXT
    assert chat.choices[0].finish_reason == "stop"
    assert chat.usage.completion_tokens == len(chat.choices[0].logprobs.content)


def test_the_client_completes() -> None:
    whole = ask(answering(TEXT), lambda client: client.completions.create(model=MODEL, prompt="a", logprobs=2))
    assert whole.choices[0].text == TEXT
    assert len(whole.choices[0].logprobs.tokens) == whole.usage.completion_tokens


def test_the_client_streams_chats() -> None:
    async def work(client: openai.AsyncOpenAI) -> list[Any]:
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}, logprobs=True
        )
        return [chunk async for chunk in stream]

    *chunks, usage = ask(answering(TEXT), work)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert usage.usage.completion_tokens > 0


def test_the_client_streams_completions() -> None:
    """Not strict: the client's own type for completion chunks does not know that finish_reason is null before the
    last one."""

    async def work(client: openai.AsyncOpenAI) -> list[Any]:
        stream = await client.completions.create(model=MODEL, prompt="a", stream=True)
        return [chunk async for chunk in stream]

    chunks = ask(answering(TEXT), work, strict=False)
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]


def test_the_client_reads_our_errors() -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(answering("the"), lambda client: client.completions.create(model=MODEL, prompt="a", max_tokens=-1))
    assert caught.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError) as missing:
        ask(answering("the"), lambda client: client.models.retrieve("other"))
    assert missing.value.code == "model_not_found"


def test_the_client_raises_on_an_error_inside_a_stream() -> None:
    async def work(client: openai.AsyncOpenAI) -> None:
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        async for _ in stream:
            pass

    with pytest.raises(openai.APIError, match="cannot grow"):
        ask(answering("the cat sat", fail_after=3, engine_error="cannot grow"), work)
