"""The HTTP API's edge: limits, bodies, models, routes, and what must not hold up other requests."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.api_client import MAX_MODEL_LEN, MODEL, answering


def test_the_models_context_limits_prompts_and_answers() -> None:
    api = answering("the")
    assert api.complete(prompt=[5] * (MAX_MODEL_LEN - 1)).status_code == 200
    assert api.worker.requests[0].params.max_tokens == 1
    for fields in ({"prompt": [5] * MAX_MODEL_LEN}, {"prompt": [5] * 100, "max_tokens": 1}, {"max_tokens": 64}):
        bodies = []
        for stream in (False, True):
            response = api.complete(**fields, stream=stream)
            assert response.status_code == 400
            bodies.append(response.json())
        assert bodies[0] == bodies[1]
        assert bodies[0]["error"]["code"] == "context_length_exceeded"
    assert len(api.worker.requests) == 1


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], ["the", ""]])
def test_an_empty_prompt_is_refused_where_the_tokenizer_adds_nothing(prompt: Any) -> None:
    api = answering("the")
    response = api.complete(prompt=prompt)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
    assert api.complete().status_code == 200


def test_an_empty_text_is_a_prompt_of_bos_where_the_tokenizer_adds_it() -> None:
    api = answering("the", "sentencepiece_bpe")
    assert api.complete(prompt="").status_code == 200
    assert api.worker.requests[0].prompt_token_ids == [1]
    assert api.complete(prompt=[]).status_code == 400


@pytest.mark.parametrize("token_id", [-1, "size", 2**63])
def test_token_ids_outside_the_vocabulary_are_refused(token_id: Any) -> None:
    api = answering("the")
    bad = api.tokenizer.vocab_size if token_id == "size" else token_id
    response = api.complete(prompt=[0, bad])
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
    assert not api.worker.requests


def test_the_number_of_prompts_is_limited() -> None:
    api = answering("the", settings={"max_prompts": 3})
    assert api.complete(prompt=["a"] * 3).status_code == 200
    assert api.complete(prompt=["a"] * 4).json()["error"]["param"] == "prompt"


def test_an_unknown_model_is_not_found_and_not_quoted() -> None:
    for response in (
        answering("the").complete(model="secret"),
        answering("the").chat(model="secret"),
        answering("the").get("/v1/models/secret"),
    ):
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert "secret" not in response.text


def test_models_are_listed() -> None:
    api = answering("the")
    listed = api.get("/v1/models").json()
    assert [model["id"] for model in listed["data"]] == [MODEL]
    assert api.get(f"/v1/models/{MODEL}").json() == listed["data"][0]
    assert listed["data"][0]["max_model_len"] == MAX_MODEL_LEN


@pytest.mark.parametrize(
    "body",
    [b"", b"{:", b"[]", b"null", b"1", b'"x"', b"\xff\xfe", b'{"prompt":', b"[" * 200_000, b"1" * 5000, b'"\xc3"'],
)
@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_a_body_that_is_no_json_object_is_refused(body: bytes, route: str) -> None:
    api = answering("the")
    response = api.post(f"/v1/{route}", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert api.complete().status_code == 200


@pytest.mark.parametrize("field", ["prompt", "stop", "user", "model"])
def test_half_a_surrogate_pair_is_refused(field: str) -> None:
    api = answering("the")
    body = json.dumps({"model": MODEL, "prompt": "a"} | {field: "\ud83d"})
    assert api.post("/v1/completions", content=body).status_code == 400


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "surrogate"])
def test_a_body_that_is_not_utf8_is_refused(encoding: str) -> None:
    text = json.dumps({"model": MODEL, "prompt": "?"})
    body = text.encode().replace(b"?", b"\xed\xa0\x80") if encoding == "surrogate" else text.encode(encoding)
    response = answering("the").post("/v1/completions", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_whole_surrogate_pair_is_text() -> None:
    api = answering("the")
    body = '{"model": "tiny", "prompt": "\\ud83d\\ude00", "echo": true}'
    assert api.post("/v1/completions", content=body).json()["choices"][0]["text"] == "😀the"


@pytest.mark.parametrize("is_announced", [True, False])
def test_a_body_beyond_the_limit_is_refused_announced_or_not(is_announced: bool) -> None:
    api = answering("the", settings={"max_body_bytes": 1000})
    body = json.dumps({"model": MODEL, "prompt": "a" * 2000}).encode()

    async def pieces() -> Any:
        for start in range(0, len(body), 100):
            yield body[start : start + 100]

    response = api.run(lambda client: client.post("/v1/completions", content=body if is_announced else pieces()))
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"
    assert api.complete().status_code == 200


def test_a_conversation_that_the_template_refuses_gets_the_templates_own_message() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]
    response = answering("the").chat(messages=messages)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"
    assert "system must come first" in response.json()["error"]["message"]


def test_unknown_routes_and_methods_get_error_objects() -> None:
    api = answering("the")
    assert api.get("/v1/nothing").status_code == 404
    assert api.get("/v1/nothing").json()["error"]["type"] == "not_found_error"
    assert api.get("/v1/completions").status_code == 405
    assert api.get("/v1/completions").json()["error"].keys() == {"message", "type", "param", "code"}


def test_health_readiness_and_metrics() -> None:
    api = answering("the")
    assert api.get("/health").status_code == 200
    assert api.get("/ready").status_code == 200
    api.is_ready = False
    assert api.get("/ready").status_code == 503
    assert api.get("/health").status_code == 200
    metrics = api.get("/metrics")
    assert metrics.text == "# HELP a b\n"
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")


@pytest.mark.parametrize(("given", "is_echoed"), [("abc-1.2_3", True), ("a" * 129, False), ("a b", False), ("", False)])
def test_a_plain_request_id_is_echoed(given: str, is_echoed: bool) -> None:
    api = answering("the")
    for path in ("/health", "/v1/nothing"):
        returned = api.get(path, headers={"x-request-id": given}).headers["x-request-id"]
        assert (returned == given) is is_echoed
        assert returned


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_other_requests_are_answered_while_a_long_prompt_is_tokenized(route: str) -> None:
    api = answering("the")
    text = "the cat sat on the mat " * 40_000
    prompt = {"prompt": text} if route == "completions" else {"messages": [{"role": "user", "content": text}]}
    body = {"model": MODEL, **prompt}

    async def work(client: httpx.AsyncClient) -> int:
        long = asyncio.ensure_future(client.post(f"/v1/{route}", json=body))
        num_answers = 0
        while not long.done():
            await client.get("/health")
            num_answers += 1
            await asyncio.sleep(0.005)
        assert (await long).json()["error"]["code"] == "context_length_exceeded"
        return num_answers

    # A loop that is held up for the whole of it answers two or three.
    assert api.run(work) >= 10
