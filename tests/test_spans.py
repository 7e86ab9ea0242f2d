"""Requests as OpenTelemetry spans, received over HTTP as a collector receives them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from deployments.config import app_args_from
from deployments.explain.spans import SpanExporter, otlp_exporter
from worker.config import ConfigError

NOW_NS = 1_700_000_000_000_000_000
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
EXPLANATION = {
    "id": "cmpl-1",
    "status": "length",
    "end_to_end_ms": 60.0,
    "time_to_first_token_ms": 35.5,
    "timeline": [["tokenize", "", 5.0], ["queue", "blocks", 20.0], ["decode", "", 35.0]],
    "preemptions": [],
    "cache": {"prompt_tokens": 12, "cached_tokens": 4},
    "workers": [{"worker": 1, "replica": "x", "lost": None}],
}


def explained(**changed: Any) -> dict[str, Any]:
    return EXPLANATION | changed


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Its address, and the spans that it got."""
    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            request = ExportTraceServiceRequest.FromString(body)
            for resource in request.resource_spans:
                spans.extend(span for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def exported(explanation: dict[str, Any], traceparent: str = "", age_ms: float = 0.0) -> list[Any]:
    """As they begin."""
    with collector() as (endpoint, spans):
        exporter = SpanExporter("demo", otlp_exporter(endpoint), lambda: NOW_NS)
        exporter.export(explanation, traceparent, age_ms)
        exporter.close()
    return sorted(spans, key=lambda span: (span.start_time_unix_nano, -span.end_time_unix_nano))


def test_a_request_is_a_span_with_the_parts_of_its_time_below_it():
    root, *parts = exported(explained(), age_ms=100.0)
    assert root.name == "generate demo"
    assert (NOW_NS - root.start_time_unix_nano, NOW_NS - root.end_time_unix_nano) == (160_000_000, 100_000_000)
    attributes = {attribute.key: attribute.value for attribute in root.attributes}
    assert attributes["gen_ai.response.id"].string_value == "cmpl-1"
    assert attributes["gen_ai.usage.input_tokens"].int_value == 12
    assert attributes["stallfree.cached_tokens"].int_value == 4
    assert attributes["stallfree.time_to_first_token_ms"].double_value == 35.5
    assert [part.name for part in parts] == ["tokenize", "queue", "decode"]
    assert {part.parent_span_id for part in parts} == {root.span_id}
    moments = [root.start_time_unix_nano, *(part.end_time_unix_nano for part in parts)]
    assert [part.start_time_unix_nano for part in parts] == moments[:-1]
    assert moments[-1] == root.end_time_unix_nano
    assert parts[1].attributes[0].value.string_value == "blocks"


def test_it_belongs_to_the_trace_of_its_client():
    root, *parts = exported(explained(), f"00-{TRACE_ID}-{PARENT_ID}-01")
    assert root.parent_span_id.hex() == PARENT_ID
    assert {span.trace_id.hex() for span in (root, *parts)} == {TRACE_ID}


@pytest.mark.parametrize("traceparent", ["", "nonsense", f"00-{'0' * 32}-{PARENT_ID}-01", f"00-{TRACE_ID}-x-01"])
def test_without_a_client_of_that_kind_it_begins_a_trace(traceparent: str):
    root, *_ = exported(explained(), traceparent)
    assert root.parent_span_id == b""
    assert root.trace_id.hex() != TRACE_ID


def test_a_client_that_is_not_sampled_is_not_followed():
    assert exported(explained(), f"00-{TRACE_ID}-{PARENT_ID}-00") == []


def test_a_request_that_failed_is_an_error():
    root, *_ = exported(explained(status="error"))
    assert root.status.code == 2


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4318", "ftp://x", "", "http://a b"])
def test_an_endpoint_that_is_no_url_is_refused_by_its_option(endpoint: str):
    with pytest.raises(ConfigError) as refusal:
        app_args_from({"model": "demo", "otlp_endpoint": endpoint})
    assert refusal.value.option == "otlp_endpoint"
