"""`stallfree explain` against a small server: what it asks, what it draws, what it says when there is no answer."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from deployments.cli.explain_table import explanation_text
from deployments.cli.main import main
from tests.server_process import free_port

EXPLANATION: dict[str, Any] = {
    "object": "request.explanation",
    "id": "cmpl-late",
    "status": "length",
    "end_to_end_ms": 200.0,
    "time_to_first_token_ms": 150.0,
    "parts": [
        {"name": "tokenize", "ms": 2.0, "cause": None, "blockers": []},
        {
            "name": "queue",
            "ms": 98.0,
            "cause": "token_budget",
            "blockers": [{"id": "cmpl-long", "ms": 90.0}],
            "others_ms": 8.0,
        },
        {"name": "decode", "ms": 100.0, "cause": None, "blockers": []},
    ],
    "timeline": [["tokenize", "", 2.0], ["queue", "token_budget", 98.0], ["decode", "", 100.0]],
    "chunks": [{"start": 0, "end": 20, "ms": 1.0, "step_ms": 2.0}],
    "preemptions": [
        {
            "at_ms": 9.0,
            "mode": "swap",
            "reason": "blocks",
            "beneficiary": "cmpl-old",
            "blocks": 3,
            "discarded_tokens": 0,
        }
    ],
    "cache": {"prompt_tokens": 20, "cached_tokens": 16},
    "workers": [
        {"worker": 1, "replica": "abc", "lost": "died"},
        {"worker": 0, "replica": "def", "lost": None},
    ],
}
ASKED: list[tuple[str, str | None]] = []


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        ASKED.append((self.path, self.headers["authorization"]))
        is_known = "cmpl-late" in self.path
        value = EXPLANATION if is_known else {"error": {"message": "no request with this id is known"}}
        body = b"oops" if "odd" in self.path else json.dumps(value).encode()
        self.send_response(200 if is_known else 404)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def url() -> Iterator[str]:
    ASKED.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_it_asks_with_the_key_and_says_where_the_time_went(url: str, capsys: pytest.CaptureFixture[str]):
    assert main(["explain", "cmpl-late", "--url", url, "--api-key", "sk-1"]) == 0
    assert ASKED == [("/v1/requests/cmpl-late/explain", "Bearer sk-1")]
    out = capsys.readouterr().out
    assert "cmpl-late  length  200.0 ms, first token after 150.0 ms" in out
    assert "queue            98.0 ms   49.0%  the token budget went to others" in out
    assert "90.0 ms  cmpl-long" in out
    assert "preempted 9.0 ms after it came to its worker (swap, 3 blocks) for cmpl-old" in out
    assert "worker 1 (abc), lost: its worker died" in out
    assert "20 tokens, 16 of them from the cache, in 1 chunk" in out


def test_the_timeline_has_a_bar_where_each_part_was():
    lines = explanation_text(EXPLANATION, width=117).splitlines()
    rows = {line.split()[0]: line[15:] for line in lines[lines.index("timeline") + 1 :] if "█" in line}
    assert rows["tokenize"] == "█"
    assert (rows["queue"].count("█"), rows["queue"].index("█")) == (49, 1)
    assert (rows["decode"].count("█"), rows["decode"].index("█")) == (50, 50)


def test_json_is_what_the_server_said(url: str, capsys: pytest.CaptureFixture[str]):
    assert main(["explain", "cmpl-late", "--url", f"{url}/", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == EXPLANATION


@pytest.mark.parametrize(
    ("request_id", "expected"),
    [("a/b?c", "no request with this id is known"), ("odd", "the server answered 404")],
)
def test_a_refusal_is_told_in_one_line(request_id: str, expected: str, url: str, capsys: pytest.CaptureFixture[str]):
    assert main(["explain", request_id, "--url", url]) == 1
    assert capsys.readouterr().err == f"stallfree: error: {expected}\n"
    assert "/explain" in ASKED[0][0]
    assert ASKED[0][0].count("/") == 4
    assert request_id != "a/b?c" or ASKED[0][0] == "/v1/requests/a%2Fb%3Fc/explain"


def test_a_server_that_is_not_there_and_a_wrong_url_are_told_apart(capsys: pytest.CaptureFixture[str]):
    assert main(["explain", "x", "--url", f"http://127.0.0.1:{free_port()}"]) == 1
    assert "does not answer" in capsys.readouterr().err
    assert main(["explain", "x", "--url", "ftp://there"]) == 2
    assert main(["explain", "x", "--url", "127.0.0.1:8000"]) == 2
