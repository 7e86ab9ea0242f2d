"""`SpanExporter`: explanations of requests as OpenTelemetry spans, sent over OTLP.

A span for the request, below the client's own where it sent a W3C `traceparent`, and one for each stretch of its time.
Names of attributes follow OpenTelemetry's conventions for generative AI where those have one. No text of prompts or
answers is in them.
"""

import time
from collections.abc import Callable
from typing import Any

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter as Exporter
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_NS_PER_MS = 1_000_000
_FAILED = frozenset({"error"})


class SpanExporter:
    """`exporter` sends spans, in a thread of its own; what cannot be sent is dropped and logged by it."""

    def __init__(self, model_name: str, exporter: Exporter, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._model_name = model_name
        self._clock_ns = clock_ns
        self._provider = TracerProvider(resource=Resource.create({"service.name": "stallfree"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("stallfree")

    def export(self, explanation: dict[str, Any], traceparent: str, age_ms: float) -> None:
        """Of a request that ended `age_ms` ago."""
        end_ns = self._clock_ns() - round(age_ms * _NS_PER_MS)
        begin_ns = end_ns - round(explanation["end_to_end_ms"] * _NS_PER_MS)
        parent = TraceContextTextMapPropagator().extract({"traceparent": traceparent}) if traceparent else Context()
        root = self._tracer.start_span(
            f"generate {self._model_name}",
            parent,
            SpanKind.SERVER,
            attributes=self._attributes(explanation),
            start_time=begin_ns,
        )
        inside = set_span_in_context(root)
        at_ns = begin_ns
        for name, cause, ms in explanation["timeline"]:
            attributes = {"stallfree.cause": cause} if cause else {}
            span = self._tracer.start_span(name, inside, attributes=attributes, start_time=at_ns)
            at_ns += round(ms * _NS_PER_MS)
            span.end(at_ns)
        if explanation["status"] in _FAILED:
            root.set_status(Status(StatusCode.ERROR))
        root.end(end_ns)

    def close(self) -> None:
        """Sends what is left; may take seconds."""
        self._provider.shutdown()

    def _attributes(self, explanation: dict[str, Any]) -> dict[str, Any]:
        cache = explanation["cache"]
        workers = [worker["worker"] for worker in explanation["workers"] if worker["worker"] is not None]
        attributes = {
            "gen_ai.operation.name": "generate_content",
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.id": explanation["id"],
            "gen_ai.usage.input_tokens": cache["prompt_tokens"],
            "stallfree.status": explanation["status"],
            "stallfree.cached_tokens": cache["cached_tokens"],
            "stallfree.preemptions": len(explanation["preemptions"]),
            "stallfree.workers": workers,
        }
        first_ms = explanation["time_to_first_token_ms"]
        return attributes if first_ms is None else attributes | {"stallfree.time_to_first_token_ms": first_ms}


def otlp_exporter(endpoint: str) -> Exporter:
    """For `http(s)://HOST:PORT/v1/traces`; whether its package is there, `AppArgs` has checked."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint)
