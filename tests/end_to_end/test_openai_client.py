"""The official client against the running server, checking every response against its own types."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.end_to_end.configuration import MODEL
from tests.server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.model]

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
PROMPT = "Three things to see in Paris are"
NUM_TOKENS = 24
CHOICES = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7}]
CHOICE_NAMES = ["greedy", "seeded"]
NUM_STREAMS = 64


def connected(server: ServerProcess, *, strict: bool) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, _strict_response_validation=strict)


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with connected(server, strict=True) as strict_client:
        yield strict_client


@pytest.fixture
def lenient_client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    """For completion streams and echoed prompts alone: the client's types do not allow the null `finish_reason` that
    OpenAI's own streams, and ours, have before the last chunk, nor the null of a prompt's first token."""
    with connected(server, strict=False) as client:
        yield client


def test_it_lists_the_model(client: openai.OpenAI):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_it_reads_paris_in_the_answer_of_a_chat(client: openai.OpenAI):
    chat = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=64)
    assert "Paris" in chat.choices[0].message.content
    assert chat.choices[0].finish_reason == "stop"
    assert chat.usage.total_tokens == chat.usage.prompt_tokens + chat.usage.completion_tokens


@pytest.mark.parametrize("choice", CHOICES, ids=CHOICE_NAMES)
def test_a_streamed_chat_joins_to_the_whole_one(client: openai.OpenAI, choice: dict[str, Any]):
    asked = {"model": MODEL, "messages": QUESTION, "max_tokens": NUM_TOKENS, "logprobs": True, **choice}
    whole = client.chat.completions.create(**asked, top_logprobs=2)
    with client.chat.completions.create(
        **asked, top_logprobs=2, stream=True, stream_options={"include_usage": True}
    ) as stream:
        *chunks, last = stream
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert [chunk.usage for chunk in chunks] == [None] * len(chunks)
    assert last.choices == []
    assert last.usage == whole.usage
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + [whole.choices[0].finish_reason]
    entries = [
        entry
        for chunk in chunks
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content or []
    ]
    expected = whole.choices[0].logprobs.content
    assert len(expected) == whole.usage.completion_tokens
    assert [entry.token for entry in entries] == [entry.token for entry in expected]
    assert [entry.logprob for entry in entries] == pytest.approx([entry.logprob for entry in expected], abs=1e-3)
    assert all(len(entry.top_logprobs) == 2 for entry in entries)


def test_no_usage_comes_unless_it_is_asked_for(client: openai.OpenAI):
    with client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=3, stream=True) as stream:
        chunks = list(stream)
    assert all(len(chunk.choices) == 1 and chunk.usage is None for chunk in chunks)


@pytest.mark.parametrize("choice", CHOICES, ids=CHOICE_NAMES)
def test_a_streamed_completion_joins_to_the_whole_one(
    client: openai.OpenAI, lenient_client: openai.OpenAI, choice: dict[str, Any]
):
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "logprobs": 2, **choice}
    whole = client.completions.create(**asked)
    with lenient_client.completions.create(**asked, stream=True, stream_options={"include_usage": True}) as stream:
        *chunks, last = stream
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert last.choices == []
    assert last.usage == whole.usage
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    expected = whole.choices[0].logprobs
    tokens = [token for chunk in chunks if chunk.choices[0].logprobs for token in chunk.choices[0].logprobs.tokens]
    assert tokens == expected.tokens
    assert len(expected.token_logprobs) == whole.usage.completion_tokens


def test_seeds_and_temperature_reach_the_sampler(client: openai.OpenAI):
    def text(**choice: Any) -> str:
        return client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=NUM_TOKENS, **choice).choices[0].text

    greedy, first, second = text(temperature=0), text(temperature=1, seed=1), text(temperature=1, seed=2)
    assert len({greedy, first, second}) == 3
    assert text(temperature=1, seed=1) == first


def test_it_scores_a_prompt_without_generating_anything(lenient_client: openai.OpenAI):
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 2}
    scored = lenient_client.completions.create(**asked, extra_body={"prompt_logprobs": 0})
    [choice] = scored.choices
    assert (choice.text, choice.finish_reason, scored.usage.completion_tokens) == (PROMPT, "length", 0)
    first, *others = choice.logprobs.token_logprobs
    assert first is None
    assert len(others) == scored.usage.prompt_tokens - 1
    assert others == [entry["logprob"] for token in choice.prompt_logprobs[1:] for entry in token.values()]
    assert all(-30 < logprob < 0 for logprob in others)
    [chunk] = lenient_client.completions.create(**asked, stream=True)
    assert chunk.choices[0].logprobs == choice.logprobs


def test_it_reads_our_errors(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=-1)
    assert caught.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="another", messages=QUESTION)
    assert missing.value.param == "model"


@pytest.mark.parametrize("round_name", ["once", "and again"])
def test_sixty_four_streams_at_once_all_end_well(server: ServerProcess, round_name: str):
    del round_name  # The same load twice: what the first leaves behind must not hinder the second.

    async def one(client: openai.AsyncOpenAI, index: int) -> tuple[str, str | None]:
        messages = [{"role": "user", "content": f"Tell me about the number {index}."}]
        stream = await client.chat.completions.create(
            model=MODEL, messages=messages, stream=True, temperature=0, max_tokens=12
        )
        async with stream:
            chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        return text, chunks[-1].choices[0].finish_reason

    async def all_at_once() -> list[tuple[str, str | None]]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
        ) as client:
            return await asyncio.gather(*(one(client, index) for index in range(NUM_STREAMS)))

    answers = asyncio.run(all_at_once())
    assert len(answers) == NUM_STREAMS
    for text, finish_reason in answers:
        assert text
        assert finish_reason in ("stop", "length")
