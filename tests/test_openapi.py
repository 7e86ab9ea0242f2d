"""The OpenAPI page: it names every route, and describes what is taken and answered."""

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.api_client import MODEL, answering, routes_of

MESSAGES = [{"role": "user", "content": "the cat"}]
TOOL_MESSAGES = [
    *MESSAGES,
    {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "a"}]},
]
TOOL_ITEMS = [
    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "a"},
]
#: pages for people, and what they fetch
UNDESCRIBED = ("/openapi.json", "/docs", "/dashboard")


def page() -> dict[str, Any]:
    document: dict[str, Any] = answering("the").get("/openapi.json").json()
    return document


def validator(document: dict[str, Any], schema: dict[str, Any]) -> Draft202012Validator:
    return Draft202012Validator({**schema, "components": document["components"]})


def test_the_page_names_every_route_and_no_other() -> None:
    served = {(method.lower(), path) for method, path in routes_of(answering("the").app)}
    described = {(method, path) for path, operations in page()["paths"].items() for method in operations}
    assert all(path.startswith(UNDESCRIBED) for _, path in served - described), served - described
    assert described <= served


def test_every_route_but_the_probes_says_that_it_wants_a_key() -> None:
    for path, operations in page()["paths"].items():
        for operation in operations.values():
            assert ("security" in operation) is (path not in {"/health", "/ready"}), path
            assert ("401" in operation["responses"]) is (path not in {"/health", "/ready"}), path


def test_every_reference_leads_somewhere() -> None:
    document = page()
    names = set(document["components"]["schemas"])
    referred = {part.split('"')[0] for part in json.dumps(document).split("#/components/schemas/")[1:]}
    assert referred <= names
    assert "422" not in json.dumps(document["paths"])


ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "the cat", "logprobs": 2, "n": 2, "stop": ["x"], "logit_bias": {"5": 1}}),
    ("/v1/completions", {"prompt": [[1, 2], [3]], "stop": "x", "temperature": 0}),
    ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "max_tokens": 1}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}),
    ("/v1/responses", {"input": "the cat", "include": ["message.output_text.logprobs"], "top_logprobs": 1}),
    ("/v1/responses", {"input": [{"role": "user", "content": "a"}], "max_output_tokens": 1}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 5, "system": [{"type": "text", "text": "a"}]}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 20, "stop_sequences": ["cat"]}),
    ("/v1/messages", {"messages": TOOL_MESSAGES, "max_tokens": 20, "tool_choice": {"type": "none"}}),
    ("/v1/responses", {"input": TOOL_ITEMS, "tool_choice": "none", "text": {"format": {"type": "json_object"}}}),
    ("/v1/messages/count_tokens", {"messages": MESSAGES}),
    ("/tokenize", {"prompt": "the cat", "return_token_strs": True}),
    ("/tokenize", {"messages": MESSAGES}),
    ("/detokenize", {"tokens": [5, 6]}),
]


@pytest.mark.parametrize(("path", "fields"), ASKED)
def test_what_is_asked_and_answered_is_as_described(path: str, fields: dict[str, Any]) -> None:
    document = page()
    operation = document["paths"][path]["post"]
    body = {"model": MODEL, **fields}
    validator(document, operation["requestBody"]["content"]["application/json"]["schema"]).validate(body)
    response = answering("the cat sat", settings={"max_model_len": 256}).post(path, json=body)
    assert response.status_code == 200, response.text
    validator(document, operation["responses"]["200"]["content"]["application/json"]["schema"]).validate(
        response.json()
    )
    wrong = answering("the cat sat").post(path, json={**body, "model": 5})
    validator(document, operation["responses"]["400"]["content"]["application/json"]["schema"]).validate(wrong.json())


CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
CALLING: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "f"}}]}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 99, "tools": [{"name": "f", "input_schema": {}}]}),
    ("/v1/responses", {"input": "a", "tools": [{"type": "function", "name": "f"}]}),
]


@pytest.mark.parametrize(("path", "fields"), CALLING)
def test_calls_and_reasoning_are_as_described(path: str, fields: dict[str, Any]) -> None:
    document = page()
    operation = document["paths"][path]["post"]
    body = {"model": MODEL, **fields}
    validator(document, operation["requestBody"]["content"]["application/json"]["schema"]).validate(body)
    api = answering(f"<think>a</think>b{CALL}", settings={"max_model_len": 4096, "reasoning_parser": "think"})
    answer = api.post(path, json=body).json()
    assert '"f"' in json.dumps(answer)
    validator(document, operation["responses"]["200"]["content"]["application/json"]["schema"]).validate(answer)


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", f"/v1/models/{MODEL}", "/version"])
def test_what_is_read_is_as_described(path: str) -> None:
    document = page()
    described = document["paths"][path.replace(MODEL, "{model_id}")]["get"]["responses"]["200"]
    validator(document, described["content"]["application/json"]["schema"]).validate(answering("the").get(path).json())


def test_the_page_for_people_loads_and_runs_nothing() -> None:
    response = answering("the").get("/docs")
    assert response.headers["content-type"].startswith("text/html")
    assert response.headers["content-security-policy"].startswith("default-src 'none'")
    for path in page()["paths"]:
        assert f"<code>{path}</code>" in response.text
    assert "<script" not in response.text
    assert "list of InputMessage or InputCall or InputCallOutput" in response.text
