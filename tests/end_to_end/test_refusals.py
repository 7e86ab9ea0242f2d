"""What cannot be served is refused with the name of its field, streamed or not, and the server goes on."""

from typing import Any

import httpx
import pytest

from tests.end_to_end.asking import completion
from tests.end_to_end.configuration import MAX_MODEL_LEN, MODEL
from tests.server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.model]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]
TOO_LONG = [5] * (MAX_MODEL_LEN + 1)

#: path, fields, status, the field that is named
REFUSED: list[tuple[str, dict[str, Any], int, str]] = [
    (COMPLETIONS, {"prompt": TOO_LONG}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [5] * MAX_MODEL_LEN}, 400, "prompt"),
    (CHAT, {"messages": [{"role": "user", "content": "many words " * MAX_MODEL_LEN}]}, 400, "messages"),
    (COMPLETIONS, {"max_tokens": MAX_MODEL_LEN}, 400, "max_tokens"),
    (CHAT, {"max_completion_tokens": MAX_MODEL_LEN}, 400, "max_completion_tokens"),
    (COMPLETIONS, {"max_tokens": -1}, 400, "max_tokens"),
    (CHAT, {"max_tokens": 0}, 400, "max_tokens"),
    (CHAT, {"max_tokens": -1}, 400, "max_tokens"),
    (COMPLETIONS, {"model": "another"}, 404, "model"),
    (CHAT, {"model": "another"}, 404, "model"),
    (COMPLETIONS, {"model": 3}, 400, "model"),
    (COMPLETIONS, {"prompt": 7}, 400, "prompt"),
    (COMPLETIONS, {"prompt": ""}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [10**9]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": ["a", 1]}, 400, "prompt"),
    (COMPLETIONS, {"temperature": "hot"}, 400, "temperature"),
    (COMPLETIONS, {"max_tokens": "5"}, 400, "max_tokens"),
    (COMPLETIONS, {"max_tokens": 1.5}, 400, "max_tokens"),
    (COMPLETIONS, {"stop": [1]}, 400, "stop[0]"),
    (COMPLETIONS, {"logit_bias": {"999999": 5}}, 400, "logit_bias"),
    (COMPLETIONS, {"seed": 2**70}, 400, "seed"),
    (COMPLETIONS, {"n": 65}, 400, "n"),
    (CHAT, {"n": 65}, 400, "n"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": "Hello"}, 400, "messages"),
    (CHAT, {"messages": [{"role": "nobody", "content": "Hello"}]}, 400, "messages[0].role"),
    (CHAT, {"tools": [{"type": "function"}]}, 400, "tools[0].function"),
]


def body_of(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    valid = {"model": MODEL, "prompt": "Hello"} if path == COMPLETIONS else {"model": MODEL, "messages": MESSAGES}
    return valid | fields


def the_server_goes_on(server: ServerProcess) -> None:
    answer = httpx.post(f"{server.url}{COMPLETIONS}", json=completion("Hello", 2, ignore_eos=True), timeout=60)
    assert answer.json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    REFUSED,
    ids=[f"{path.split('/')[2]} {next(iter(fields))} {index}" for index, (path, fields, *_) in enumerate(REFUSED)],
)
def test_it_is_refused_by_name_streamed_or_not(
    server: ServerProcess, path: str, fields: dict[str, Any], status: int, param: str
):
    bodies = [body_of(path, fields) | {"stream": stream} for stream in (False, True)]
    whole, streamed = (httpx.post(f"{server.url}{path}", json=body, timeout=30) for body in bodies)
    error = whole.json()["error"]
    assert whole.status_code == status
    assert error["param"] == param
    assert error["message"]
    assert (streamed.status_code, streamed.json()) == (whole.status_code, whole.json())


@pytest.mark.parametrize("body", [b'{"model": ', b"", b"[]", b"\xff\xfe", b'"text"', b'{"prompt": "\\ud83d"}'])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_what_is_no_json_object_is_refused(server: ServerProcess, path: str, body: bytes):
    answer = httpx.post(f"{server.url}{path}", content=body, headers={"Content-Type": "application/json"}, timeout=30)
    assert answer.status_code == 400
    assert "body" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("missing", ["model", "input"])
def test_what_is_missing_is_named(server: ServerProcess, path: str, missing: str):
    field = missing if missing == "model" else "prompt" if path == COMPLETIONS else "messages"
    body = {name: value for name, value in body_of(path, {}).items() if name != field}
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=30)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_an_id_that_is_no_text_is_replaced_by_one_that_is(server: ServerProcess):
    for given in (b"\xe9\xff", "é".encode()):
        answer = httpx.get(f"{server.url}/v1/models", headers={"x-request-id": given}, timeout=30)
        assert answer.status_code == 200
        (request_id,) = answer.headers.get_list("x-request-id")
        assert request_id.isascii()


def test_a_prompt_one_token_short_of_the_context_gets_one_token(server: ServerProcess):
    body = {"model": MODEL, "prompt": [5] * (MAX_MODEL_LEN - 1), "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{server.url}{COMPLETIONS}", json=body, timeout=60).json()
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["choices"][0]["finish_reason"] == "length"


def test_the_server_goes_on_after_all_of_that(server: ServerProcess):
    the_server_goes_on(server)
    assert httpx.get(f"{server.url}/ready", timeout=10).status_code == 200
