"""Several answers to a prompt over the HTTP API: samples, the best of them, beams, and what is counted of each."""

import asyncio
from typing import Any

import pytest

from tests.api_client import MODEL, Api, answering, stream_events
from tests.fake_worker import FakeWorker
from tests.tiny_tokenizers import tokenizer_of

TEXTS = ["the cat sat", "a dog", "one two three four"]


def several(texts: list[str] = TEXTS, settings: dict[str, Any] | None = None, **worker: Any) -> Api:
    """An API whose worker gives sample i the text `texts[i]`, then the end-of-sequence token."""
    tokenizer = tokenizer_of("byte_level")
    fake = FakeWorker(
        sample_ids=[tokenizer.encode(text) for text in texts], stop_token_id=tokenizer.eos_token_id, **worker
    )
    return Api(fake, settings=settings or {})


def num_tokens_of(api: Api, texts: list[str] = TEXTS) -> int:
    """With the end-of-sequence token of each."""
    return sum(len(api.tokenizer.encode(text)) + 1 for text in texts)


def texts_of(events: list[Any], num_choices: int) -> list[str]:
    texts = [""] * num_choices
    for event in events[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
    return texts


# --- samples


@pytest.mark.parametrize("route", ["complete", "chat"])
def test_each_index_has_its_own_whole_text(route: str) -> None:
    # vllm-project/vllm#16863, sgl-project/sglang#910
    api = several()
    body = getattr(api, route)(n=3).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    texts = [choice["text"] if route == "complete" else choice["message"]["content"] for choice in body["choices"]]
    assert texts == TEXTS
    assert [choice["finish_reason"] for choice in body["choices"]] == ["stop"] * 3
    [request] = api.worker.requests
    assert request.params.n == 3


@pytest.mark.parametrize("route", ["complete", "chat"])
def test_streamed_choices_are_mixed_and_each_ends_once(route: str) -> None:
    api = several()
    events = stream_events(getattr(api, route)(n=3, stream=True))
    assert texts_of(events, 3) == TEXTS
    choices = [choice for event in events[:-1] for choice in event["choices"]]
    for index in range(3):
        reasons = [choice["finish_reason"] for choice in choices if choice["index"] == index]
        assert [reason for reason in reasons if reason is not None] == [reasons[-1]] == ["stop"]
    indices = [choice["index"] for choice in choices]
    assert indices != sorted(indices)
    if route == "chat":
        roles = [choice["index"] for choice in choices if "role" in choice["delta"]]
        assert sorted(roles) == [0, 1, 2]


@pytest.mark.parametrize("stream", [True, False])
def test_a_prompt_counts_once_and_every_answer_counts(stream: bool) -> None:
    # vllm-project/vllm#56361
    api = several(num_cached_tokens=1)
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    response = api.complete(n=3, **options)
    usage = stream_events(response)[-2]["usage"] if stream else response.json()["usage"]
    num_prompt_tokens = len(api.tokenizer.encode("the cat"))
    assert usage == {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens_of(api),
        "total_tokens": num_prompt_tokens + num_tokens_of(api),
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert api.metrics.finished == [("stop", num_prompt_tokens)]
    assert api.metrics.num_tokens == num_tokens_of(api)
    assert len(api.metrics.ttfts_s) == 1
    assert len(api.metrics.gaps_s) == num_tokens_of(api) - 3


def test_answers_of_several_prompts_are_numbered_prompt_after_prompt() -> None:
    api = several(num_cached_tokens=2)
    body = api.complete(prompt=["a", "the dog"], n=2).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
        (0, TEXTS[0]), (1, TEXTS[1]), (2, TEXTS[0]), (3, TEXTS[1]),
    ]  # fmt: skip
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert len(api.metrics.finished) == 2
    events = stream_events(api.complete(prompt=["a", "the dog"], n=2, stream=True, echo=True))
    assert texts_of(events, 4) == [prompt + text for prompt in ("a", "the dog") for text in TEXTS[:2]]


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_ends_its_own_choice_and_the_worker_is_told_which(stream: bool) -> None:
    api = several(delay_s=0.001)
    response = api.complete(n=3, stop=["dog"], stream=stream)
    expected = [TEXTS[0], "a ", TEXTS[2]]
    if stream:
        assert texts_of(stream_events(response), 3) == expected
    else:
        assert [choice["text"] for choice in response.json()["choices"]] == expected
    [(request_id, index, num_tokens)] = api.worker.finished
    assert (request_id, index) == (api.worker.requests[0].request_id, 1)
    assert api.tokenizer.decode(api.worker.sample_ids[1][:num_tokens]) == "a dog"
    assert api.worker.aborted == []
    assert api.worker.num_open == 0


def test_tokens_of_an_answer_that_has_ended_are_neither_sent_nor_counted() -> None:
    api = several(["a dog " * 8, "one two " * 10])
    body = api.complete(n=2, stop=["dog"]).json()
    assert [choice["text"] for choice in body["choices"]] == ["a ", "one two " * 10]
    num_first = api.worker.finished[0][2]
    assert body["usage"]["completion_tokens"] == num_first + num_tokens_of(api, ["one two " * 10])
    assert api.metrics.num_tokens == body["usage"]["completion_tokens"]


def test_a_worker_that_is_slow_to_be_told_holds_up_no_other_choice() -> None:
    api = several(["a dog", "one two three four"])
    is_told = asyncio.Event()

    async def finish(request_id: str, index: int, num_tokens: int) -> None:
        await is_told.wait()

    api.worker.finish = finish  # type: ignore[method-assign]

    async def ask(client: Any) -> str:
        text = ""
        body = {"model": MODEL, "prompt": "the", "n": 2, "stop": ["dog"], "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for part in response.aiter_text():
                text += part
                is_told.set()  # the transport hands on a whole response: it has ended by now
        return text

    async def main(client: Any) -> str:
        asked = asyncio.create_task(ask(client))
        await asyncio.sleep(0.3)
        assert api.worker.num_produced == len(api.worker.sample_ids[0]) + len(api.worker.sample_ids[1]) + 2
        is_told.set()
        return await asked

    assert api.run(main).rstrip().endswith("data: [DONE]")


def test_a_failure_of_one_sample_fails_the_request() -> None:
    api = several(engine_error="the engine died", fail_after=1)
    assert api.complete(n=2).status_code == 500
    events = stream_events(api.complete(n=2, stream=True))
    assert "error" in events[-1]
    assert [reason for reason, _ in api.metrics.finished] == ["error"] * 2
    assert api.worker.num_open == 0


# --- the best of them


def test_best_of_returns_those_with_the_highest_mean_logprob_best_first() -> None:
    api = several(sample_logprobs=[[-0.9], [-0.5], [-0.7]])
    body = api.complete(n=2, best_of=3).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, TEXTS[1]), (1, TEXTS[2])]
    assert all(choice["logprobs"] is None for choice in body["choices"])
    assert body["usage"]["completion_tokens"] == num_tokens_of(api)
    assert api.worker.requests[0].params.n == 3


def test_best_of_ranks_by_the_mean_and_not_by_the_sum() -> None:
    api = several(["one two three four " * 2, "a"], sample_logprobs=[[-0.4], [-0.5]])
    assert api.complete(best_of=2).json()["choices"][0]["text"].startswith("one")


def test_best_of_ranks_what_a_stop_string_left() -> None:
    num_kept = len(tokenizer_of("byte_level").encode("the cat"))
    api = several(["the cat sat on the mat", "a dog"], sample_logprobs=[[-0.1] * num_kept + [-50.0] * 20, [-0.5]])
    assert api.complete(best_of=2).json()["choices"][0]["text"] == "a dog"
    assert api.complete(best_of=2, stop=["cat"]).json()["choices"][0]["text"] == "the "


def test_best_of_equal_answers_keeps_their_order_and_each_prompts_own() -> None:
    api = several(sample_logprobs=[[-0.5], [-0.5], [-0.1]])
    body = api.complete(prompt=["a", "the dog"], best_of=3, n=2, logprobs=1).json()
    assert [choice["text"] for choice in body["choices"]] == [TEXTS[2], TEXTS[0]] * 2
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["choices"][0]["logprobs"]["token_logprobs"][0] == -0.1


# --- beams


def test_beams_come_in_the_order_of_the_engine_streamed_or_not() -> None:
    api = several()
    body = api.complete(use_beam_search=True, beam_width=4, n=3, temperature=0).json()
    assert [choice["text"] for choice in body["choices"]] == TEXTS
    assert api.worker.requests[0].params.beam is not None
    assert texts_of(stream_events(api.complete(use_beam_search=True, n=3, stream=True)), 3) == TEXTS


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("route", ["complete", "chat"])
def test_stop_strings_do_not_go_with_beams(route: str, stream: bool) -> None:
    response = getattr(several(), route)(use_beam_search=True, stop=["x"], stream=stream)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "stop"


# --- limits


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 1000000}, "n"),
        ({"n": 5}, "n"),
        ({"best_of": 1000000}, "best_of"),
        ({"n": 2, "use_beam_search": True, "beam_width": 1000000}, "beam_width"),
    ],
)
def test_more_answers_than_allowed_are_refused_before_anything_is_made(
    fields: dict[str, Any], param: str, stream: bool
) -> None:
    # vllm-project/vllm#37952
    api = several(settings={"max_n": 4})
    for response in (api.complete(stream=stream, **fields), api.chat(stream=stream, **fields)):
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
    assert api.worker.requests == []
    assert api.complete(n=3).status_code == 200


def test_answers_to_all_prompts_together_are_limited() -> None:
    api = several(settings={"max_sequences": 6})
    refused = api.complete(prompt=["a"] * 3, n=3)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
    assert "9" in refused.json()["error"]["message"]
    assert api.complete(prompt=["a"] * 2, n=3).status_code == 200
    assert api.complete(prompt=["a"] * 3, use_beam_search=True, beam_width=3).json()["error"]["param"] == "beam_width"


# --- order, tenants, salt


def test_priority_is_capped_and_the_salt_handed_on() -> None:
    api = answering("the", settings={"most_urgent_priority": -1})
    for priority, expected in ((None, 0), (5, 5), (-1, -1), (-100, -1)):
        api.complete(priority=priority, cache_salt="mine")
        assert (api.worker.requests[-1].priority, api.worker.requests[-1].cache_salt) == (expected, "mine")
    api.chat()
    assert (api.worker.requests[-1].priority, api.worker.requests[-1].cache_salt) == (0, "")


def test_the_tenant_is_the_named_headers_value_and_nobody_without_it() -> None:
    api = answering("the", settings={"tenant_header": "X-Team"})
    body = {"model": MODEL, "prompt": "the cat"}
    for headers, tenant in (({"x-team": "blue"}, "blue"), ({}, ""), ({"x-team": ""}, ""), ({"x-other": "red"}, "")):
        assert api.post("/v1/completions", json=body, headers=headers).status_code == 200
        assert api.worker.requests[-1].tenant == tenant
    off = answering("the")
    off.post("/v1/completions", json=body, headers={"x-team": "blue"})
    assert off.worker.requests[-1].tenant == ""


@pytest.mark.parametrize("value", ["a b", "x" * 65, "a,b", "\u00e9".encode()])
def test_a_tenant_that_is_no_name_is_refused(value: str | bytes) -> None:
    api = answering("the", settings={"tenant_header": "X-Team"})
    response = api.post("/v1/completions", json={"model": MODEL, "prompt": "a"}, headers={b"x-team": value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "X-Team"
    assert api.worker.requests == []
