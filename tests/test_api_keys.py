"""API keys over HTTP: which routes want one, how it comes, and what it says of a request."""

import json
import logging
from typing import Any

import pytest

from deployments.keys import KeyRing
from monitoring.ingress_metrics import IngressMetrics
from tests.api_client import MODEL, Api, answering, routes_of

KEY, ADMIN_KEY = "sk-ordinary-4711", "sk-admin-0815"
KEYS = KeyRing.parse(
    json.dumps(
        [
            {"key": KEY, "tenant": "team-a", "max_priority": -5},
            {"key": ADMIN_KEY, "tenant": "team-b", "admin": True},
        ]
    )
)
OPEN_ROUTES = {"/health", "/ready", "/dashboard"}


def guarded(**settings: Any) -> Api:
    return answering("the cat", settings={"keys": KEYS, **settings})


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("headers", [{}, bearer("wrong"), {"x-api-key": "wrong"}, {"Authorization": f"Basic {KEY}"}])
def test_every_route_but_the_probes_wants_a_key(headers: dict[str, str]) -> None:
    api = guarded()
    routes = routes_of(api.app)
    assert {path for _, path in routes} > {*OPEN_ROUTES, "/v1/chat/completions", "/metrics", "/v1/models/{model_id}"}
    for method, path in routes:
        response = api.request(method, path.replace("{model_id}", MODEL), headers=headers)
        if path in OPEN_ROUTES:
            assert response.status_code == 200, path
            continue
        assert response.status_code == 401, path
        assert response.headers["www-authenticate"] == "Bearer"
        if path.startswith("/v1/messages"):
            assert response.json()["error"]["type"] == "authentication_error"
        else:
            assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.json()["error"].keys() >= {"message", "type"}
        assert KEY not in response.text
    assert not api.worker.requests


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("GET", "/nothing"),
        ("GET", "/health/"),
        ("GET", "//health"),
        ("GET", "/health/../metrics"),
        ("GET", "/v1/models/health"),
        ("OPTIONS", "/v1/completions"),
        ("DELETE", "/v1/models"),
        ("HEAD", "/metrics"),
    ],
)
def test_what_is_no_route_wants_a_key_too(method: str, path: str) -> None:
    assert guarded().request(method, path).status_code == 401


@pytest.mark.parametrize("headers", [bearer(KEY), {"authorization": f"bearer  {KEY}"}, {"x-api-key": KEY}])
def test_a_key_comes_in_either_header(headers: dict[str, str]) -> None:
    api = guarded()
    assert api.complete_with(headers).status_code == 200
    assert api.get("/v1/models", headers=headers).status_code == 200


def test_without_keys_every_route_is_open() -> None:
    api = answering("the cat")
    assert api.get("/metrics").status_code == 200
    assert api.complete_with({}).status_code == 200


def test_the_tenant_is_the_keys_whatever_a_header_says() -> None:
    api = guarded(tenant_header="x-team")
    api.complete_with({**bearer(KEY), "x-team": "team-b"})
    api.complete_with({"x-api-key": ADMIN_KEY})
    assert [request.tenant for request in api.worker.requests] == ["team-a", "team-b"]


def test_served_tokens_and_refusals_are_counted_by_declared_tenants_alone() -> None:
    metrics = IngressMetrics(MODEL, KEYS.tenants)
    api = Api(guarded().worker, settings={"keys": KEYS}, metrics=metrics)  # type: ignore[arg-type]
    usage = api.complete_with(bearer(KEY), user="mallory").json()["usage"]
    assert api.complete_with(bearer(ADMIN_KEY), prompt=[1] * 100, user="mallory").status_code == 400
    assert api.complete_with(bearer("wrong"), user="mallory").status_code == 401
    counters = metrics.snapshot()["counters"]
    assert counters["stallfree_tenant_requests_total"] == {"team-a": 1, "team-b": 0, "other": 0}
    assert counters["stallfree_tenant_rejections_total"] == {"team-a": 0, "team-b": 1, "other": 0}
    assert counters["stallfree_tenant_prompt_tokens_total"]["team-a"] == usage["prompt_tokens"]
    assert counters["stallfree_tenant_generation_tokens_total"]["team-a"] == usage["completion_tokens"]


def test_calls_that_the_gate_turns_away_are_counted_by_tenant_too() -> None:
    metrics = IngressMetrics(MODEL, ("team-a",))
    settings = {"tenant_header": "x-team"}
    api = Api(guarded().worker, settings=settings, metrics=metrics, are_workers_running=False)  # type: ignore[arg-type]
    for team in ("team-a", "mallory", "not a name!"):
        assert api.complete_with({"x-team": team}).status_code == 503
    assert metrics.snapshot()["counters"]["stallfree_tenant_rejections_total"] == {"team-a": 1, "other": 2}


def test_a_key_bounds_the_urgency_of_its_requests() -> None:
    api = guarded(most_urgent_priority=-50)
    for key, asked in ((KEY, -100), (KEY, 3), (ADMIN_KEY, -100)):
        api.complete_with(bearer(key), priority=asked)
    assert [request.priority for request in api.worker.requests] == [-5, 3, -50]


def test_metrics_want_an_admins_key() -> None:
    api = guarded()
    assert api.get("/metrics", headers=bearer(ADMIN_KEY)).status_code == 200
    refused = api.get("/metrics", headers=bearer(KEY))
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "insufficient_permissions")


def test_keys_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    api = guarded()
    for key in (KEY, "sk-wrong-4711"):
        api.complete_with(bearer(key))
        api.post("/v1/completions", content=b"{", headers=bearer(key))
        api.get("/v1/nothing", headers=bearer(key))
    assert "4711" not in caplog.text
    assert "4711" not in repr(api.app.state.service.settings)


ORIGIN = {"Origin": "https://page.example"}
PREFLIGHT = {**ORIGIN, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}


def test_pages_of_other_origins_may_not_ask_unless_they_are_named() -> None:
    closed = guarded()
    assert "access-control-allow-origin" not in closed.get("/health", headers=ORIGIN).headers
    assert closed.request("OPTIONS", "/v1/completions", headers=PREFLIGHT).status_code == 401
    for origins, allowed in ((("https://page.example",), "https://page.example"), (("*",), "*")):
        open_to_pages = Api(closed.worker, settings={"keys": KEYS}, cors_origins=origins)
        preflight = open_to_pages.request("OPTIONS", "/v1/completions", headers=PREFLIGHT)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == allowed
        assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
        # Also a refusal must be readable by the page.
        refused = open_to_pages.request("POST", "/v1/completions", headers=ORIGIN)
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, allowed)
        assert "x-request-id" in refused.headers["access-control-expose-headers"]
    named = Api(closed.worker, cors_origins=("https://page.example",))
    other = named.get("/health", headers={"Origin": "https://other.example"})
    assert "access-control-allow-origin" not in other.headers


def test_a_probe_below_a_prefix_stays_open() -> None:
    api = guarded()
    api.app.root_path = "/llm"
    assert api.get("/llm/health").status_code == 200
    assert api.get("/llm/v1/models").status_code == 401
    assert api.get("/llm/v1/models", headers=bearer(KEY)).status_code == 200
