"""`Ingress`: the Serve deployment around the HTTP API of `deployments.api`.

Owns what an API needs to run in Serve: the tokenizer, the client over the worker deployment, and the reports to the
metrics actor. Loads no model, and knows nothing of routes.
"""

import asyncio
import logging
from dataclasses import dataclass
from secrets import token_bytes
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.handle import DeploymentHandle

from deployments.api import create_api
from deployments.api_service import ApiService, ApiSettings
from deployments.build_facts import ingress_build
from deployments.dashboard_source import ActorDashboard
from deployments.explain.desk import ExplainDesk
from deployments.explain.journeys import Journeys
from deployments.explain.push import ExplanationPusher
from deployments.failover import FailoverClient
from deployments.keys import KeyRing
from deployments.metrics_push import PUSH_PERIOD_S, MetricsPusher, log_failure
from deployments.model_facts import ModelFacts
from deployments.protocol.errors import unavailable
from deployments.readiness import ReadyProbe
from deployments.replica_log import write_to_serves_log
from deployments.request_log import open_request_log
from deployments.router_state import ROUTER_STATE
from deployments.serve_client import ClientTimeouts, ServeWorkerClient
from monitoring.ingress_metrics import IngressMetrics
from monitoring.metrics_actor import get_or_create
from worker.prefix_keys import PrefixKeys
from worker.text import Tokenizer
from worker.weights import resolve_model

if TYPE_CHECKING:
    from deployments.explain.spans import SpanExporter

logger = logging.getLogger(__name__)

NUM_SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class IngressSettings:
    """`model` is where the tokenizer is read; `model_name` what clients call it."""

    model: str
    revision: str | None
    trust_remote_code: bool
    model_name: str
    chat_template: str | None
    tool_call_parser: str
    reasoning_parser: str
    metrics_host: str
    metrics_port: int
    vllm_metric_names: bool
    request_log: str | None
    timeouts: ClientTimeouts
    max_n: int
    most_urgent_priority: int
    tenant_header: str | None
    keys: KeyRing | None
    tenants: tuple[str, ...]
    cors_origins: tuple[str, ...]
    enable_prefix_caching: bool
    max_open_requests: int
    request_timeout_s: float
    keep_alive_s: float
    otlp_endpoint: str | None = None


class Ingress:
    """Ready once a worker is, since limits of requests are the model's."""

    async def __init__(self, worker: DeploymentHandle[Any], settings: IngressSettings) -> None:  # type: ignore[misc]
        write_to_serves_log()
        context = serve.get_replica_context()
        self._metrics = IngressMetrics(settings.model_name, settings.tenants)
        self._metrics.build(**ingress_build())
        self._request_log = open_request_log(settings.request_log, settings.model_name)
        self._actor, tokenizer = await asyncio.gather(
            asyncio.to_thread(
                get_or_create,
                context.app_name,
                settings.metrics_host,
                settings.metrics_port,
                with_vllm_names=settings.vllm_metric_names,
            ),
            asyncio.to_thread(_load_tokenizer, settings),
        )
        facts: ModelFacts = await worker.options(method_name="describe", _by_reference=False).remote()
        attempts = ServeWorkerClient(
            worker, settings.timeouts, ROUTER_STATE, self._metrics.routed, _prefix_keys(settings, facts)
        )
        source = f"ingress-{context.replica_id.unique_id}"
        self._spans = _spans(settings)
        spans = () if self._spans is None else (self._spans.export,)
        journeys = Journeys(attempts.life, listeners=(self._count_phases, *spans))
        self._explanations = ExplanationPusher(self._actor, source, journeys)
        self._service = ApiService(
            FailoverClient(attempts, settings.timeouts.accept_s, self._metrics.failover, journeys),
            tokenizer,
            ApiSettings(
                served_model_name=settings.model_name,
                max_model_len=facts.max_model_len,
                vocab_size=facts.vocab_size,
                generation_defaults=facts.generation_defaults,
                max_n=settings.max_n,
                most_urgent_priority=settings.most_urgent_priority,
                tenant_header=settings.tenant_header,
                tool_call_parser=settings.tool_call_parser,
                reasoning_parser=settings.reasoning_parser,
                keys=settings.keys,
                max_open_requests=settings.max_open_requests,
                request_timeout_s=settings.request_timeout_s,
                keep_alive_s=settings.keep_alive_s,
            ),
            self._metrics,
            is_ready=ReadyProbe(ROUTER_STATE.running_ids, attempts.check_ready).is_ready,
            metrics_text=self._metrics_text,
            dashboard=ActorDashboard(self._actor),
            is_any_worker=ROUTER_STATE.has_running,
            request_log=self._request_log,
            explain=ExplainDesk(journeys, self._explanations.find),
        )
        self._cors_origins = settings.cors_origins
        self._service.grammars.warm_up()
        self._pusher = MetricsPusher(self._actor, source)
        self._reporter = asyncio.create_task(self._report_metrics())
        self._reporter.add_done_callback(log_failure)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve when the constructor is done."""
        api = create_api(self._cors_origins, behind_serve=True)
        api.state.service = self._service
        return api

    async def drain(self, timeout_s: float) -> None:
        """Called before the application ends: takes no request any more, lets running answers have `timeout_s`, and
        ends the others with an error that their clients can read. Returns when nothing is open."""
        await self._service.admission.drain(timeout_s)

    def _count_phases(self, explanation: dict[str, Any], *_: object) -> None:
        """Of a request that has ended; one that no worker took has none."""
        if any(worker["worker"] is not None for worker in explanation["workers"]):
            self._metrics.request_phases((part["name"], part["ms"] / 1e3) for part in explanation["parts"])

    async def _metrics_text(self) -> str:
        """All metrics of the application; those of this replica as they are now. Raises ApiError."""
        await self._pusher.push(self._metrics.snapshot())
        try:
            text: str = await self._actor.render.remote()
        except RayActorError as error:
            raise unavailable("the metrics actor is starting again") from error
        return text

    async def _report_metrics(self) -> None:
        while True:
            await self._pusher.push(self._metrics.snapshot())
            await self._explanations.push()
            await asyncio.sleep(PUSH_PERIOD_S)

    async def __del__(self) -> None:
        """Serve calls it after the drain, also for a replica whose start failed."""
        if hasattr(self, "_reporter"):
            self._reporter.cancel()
            self._pusher.say_goodbye()
            self._service.grammars.close()
            self._request_log.close()
            if self._spans is not None:
                await asyncio.to_thread(self._spans.close)


def _prefix_keys(settings: IngressSettings, facts: ModelFacts) -> PrefixKeys | None:
    """Names of blocks for this process's own router: they are never compared with those of workers, so that the
    secret is its own, too."""
    if not settings.enable_prefix_caching:
        return None
    return PrefixKeys(token_bytes(NUM_SECRET_BYTES), facts.block_size)


def _spans(settings: IngressSettings) -> "SpanExporter | None":
    if settings.otlp_endpoint is None:
        return None
    from deployments.explain.spans import SpanExporter, otlp_exporter

    return SpanExporter(settings.model_name, otlp_exporter(settings.otlp_endpoint))


def _load_tokenizer(settings: IngressSettings) -> Tokenizer:
    folder = resolve_model(settings.model, settings.revision, trust_remote_code=settings.trust_remote_code)
    return Tokenizer(folder, settings.chat_template)
