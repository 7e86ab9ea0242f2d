"""The dashboard's page and the routes around it, in process."""

import base64
import hashlib
import json
import re
from typing import Any

import pytest

from deployments.keys import KeyRing
from monitoring.dashboard_page import dashboard_page
from monitoring.step_feed import FIELDS
from tests.api_client import Api, answering

KEYS = KeyRing.parse(json.dumps([{"key": "sk-plain-0001", "tenant": "a"}, {"key": "sk-admin-0002", "admin": True}]))
LIFE = {
    "id": "cmpl-1",
    "status": "stop",
    "end_to_end_ms": 3.0,
    "parts": [{"name": "queue", "ms": 3.0, "cause": "blocks", "blockers": []}],
    "timeline": [["queue", "blocks", 3.0]],
}
STORED = {"id": "cmpl-1", "aliases": [], "tenant": "", "key_id": "", "text": json.dumps(LIFE), "ended_s": 0.001}
DATA: dict[str, Any] = {
    "now_ms": 1.0,
    "now": {},
    "steps": {"store_id": "ab", "cursor": 7, "rows": {}},
    "newest": [STORED],
}


def test_the_page_has_everything_in_it_and_may_ask_nobody_else():
    page = dashboard_page()
    scripts = re.findall(r"<script>(.*?)</script>", page.html, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert len(hashes) > 1
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    assert f"script-src {allowed};" in page.content_security_policy
    assert "default-src 'none'" in page.content_security_policy
    assert "connect-src 'self'" in page.content_security_policy
    assert not re.search(r"<(script|link|img)[^>]*(src|href)=.?(https?:)?//", page.html)
    assert "<!-- styles -->" not in page.html
    assert "<!-- scripts -->" not in page.html


def test_the_page_reads_rows_in_the_order_in_which_they_are_written():
    [listed] = re.findall(r"const FIELDS = \[(.*?)\];", dashboard_page().html, re.DOTALL)
    assert tuple(re.findall(r'"(\w+)"', listed)) == FIELDS


def api_with(asked: list[tuple[object, ...]], **settings: Any) -> Api:
    api = answering("the cat", settings=settings)

    class Dashboard:
        async def now(self, cursor: int, store_id: str, num_requests: int) -> Any:
            asked.append((cursor, store_id))
            return DATA

        async def window(self, seconds: float, num_requests: int) -> Any:
            asked.append((seconds,))
            return {"rows": {}, "newest": [STORED]}

    api.service.dashboard = Dashboard()
    return api


def test_anybody_may_load_the_page_but_its_data_wants_an_admins_key():
    asked: list[tuple[object, ...]] = []
    api = api_with(asked, keys=KEYS)
    assert api.get("/dashboard").status_code == 200
    assert api.get("/dashboard/data").status_code == 401
    assert api.get("/dashboard/data", headers={"x-api-key": "sk-plain-0001"}).status_code == 403
    assert asked == []
    response = api.get("/dashboard/data?cursor=7&store=ab", headers={"x-api-key": "sk-admin-0002"})
    assert response.status_code == 200
    parts = [{"name": "queue", "ms": 3.0}]
    requests = [{"id": "cmpl-1", "status": "stop", "end_to_end_ms": 3.0, "parts": parts}]
    assert response.json() == {**{name: DATA[name] for name in ("now_ms", "now", "steps")}, "requests": requests}
    assert response.headers["cache-control"] == "no-store"
    assert asked == [(7, "ab")]


@pytest.mark.parametrize("cursor", ["-1", "x", "1.5", "9" * 30, "", "٣"])
def test_a_cursor_that_is_no_number_of_ours_is_refused_by_name(cursor: str):
    response = api_with([]).get("/dashboard/data", params={"cursor": cursor})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "cursor"


def test_a_trace_is_an_admins_and_of_at_most_an_hour():
    asked: list[tuple[object, ...]] = []
    api = api_with(asked, keys=KEYS)
    assert api.get("/dashboard/trace").status_code == 401
    assert api.get("/dashboard/trace", headers={"x-api-key": "sk-plain-0001"}).status_code == 403
    for seconds in ("0", "-1", "3601", "x", "99999", "٣"):
        response = api.get("/dashboard/trace", params={"seconds": seconds}, headers={"x-api-key": "sk-admin-0002"})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "seconds"), seconds
    response = api.get("/dashboard/trace", headers={"x-api-key": "sk-admin-0002"})
    assert [event["name"] for event in response.json()["traceEvents"] if event["ph"] == "b"] == ["cmpl-1", "queue"]
    assert asked == [(60.0,)]
    assert "attachment" in response.headers["content-disposition"]
