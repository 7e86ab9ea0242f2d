"""The id of a request under Serve, whose own middleware stands before the API in the proxy."""

from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from ray.serve._private.http_util import RequestIdMiddleware, validate_http_proxy_callback_return
from ray.serve._private.utils import call_function_from_import_path

from deployments.config import RAY_ENVIRONMENT
from deployments.ingress import Ingress
from deployments.proxy_headers import middlewares
from tests.api_client import MODEL, Api, answering

MESSAGE = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "the"}]}


def behind_serve(**fault: Any) -> Api:
    api = answering("the", **fault)
    ingress: Any = SimpleNamespace(_cors_origins=("https://a.example",), _service=api.service)
    api.app = RequestIdMiddleware(Ingress.__serve_build_asgi_app__(ingress))  # type: ignore[assignment]
    return api


def ids_of(response: httpx.Response) -> list[str]:
    return response.headers.get_list("x-request-id")


@pytest.mark.parametrize("given", ["abc-1.2_3", "a b", "a" * 500, ""])
def test_under_serve_a_clients_id_comes_back_once(given: str) -> None:
    api, headers = behind_serve(), {"x-request-id": given}
    for path in ("/health", "/v1/models", "/v1/nothing"):
        assert ids_of(api.get(path, headers=headers)) == [given]
    for stream in (False, True):
        answer = api.post("/v1/messages", json=MESSAGE | {"stream": stream}, headers=headers)
        assert (answer.status_code, ids_of(answer)) == (200, [given])
    refused = api.post("/v1/messages", json=MESSAGE | {"model": "other"}, headers=headers)
    assert ids_of(refused) == [given]
    assert refused.json()["request_id"] == given


@pytest.mark.parametrize("given", [b"\xe9\xff", "é😀".encode(), b"", b"  "])
def test_an_id_that_is_empty_or_that_the_proxy_cannot_read_never_reaches_it(given: bytes) -> None:
    api = behind_serve()
    for middleware in reversed(middlewares()):
        api.app = middleware.cls(api.app)  # type: ignore[assignment]
    refused = api.post("/v1/messages", json=MESSAGE | {"model": "other"}, headers={"x-request-id": given})
    (request_id,) = ids_of(refused)
    assert request_id.isascii()
    assert request_id.strip()
    assert refused.json()["request_id"] == request_id
    assert ids_of(api.get("/health", headers={"x-request-id": "plain"})) == ["plain"]


def test_serve_is_told_where_the_middleware_is() -> None:
    path = RAY_ENVIRONMENT["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"]
    assert validate_http_proxy_callback_return(call_function_from_import_path(path))


def test_under_serve_a_request_without_an_id_gets_one() -> None:
    api = behind_serve()
    (request_id,) = ids_of(refused := api.post("/v1/messages", json=MESSAGE | {"model": "other"}))
    assert request_id
    assert refused.json()["request_id"] == request_id
    assert ids_of(api.get("/health")) != [request_id]


@pytest.mark.parametrize("make", [answering, behind_serve])
def test_an_unexpected_failure_has_one_id_too(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: Api) -> str:
        raise RuntimeError("broken")

    monkeypatch.setattr(Api, "_metrics_text", broken)
    api = make("the") if make is answering else make()
    response = api.get("/metrics")
    assert response.status_code == 500
    (request_id,) = ids_of(response)
    assert request_id
