"""The HTTP API: routes, and the one place where errors become responses. Text and workers are `ApiService`'s matter,
which the routes find at `app.state.service`.
"""

import asyncio
import logging
import time
from collections.abc import Collection
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, PlainTextResponse, Response

from deployments import dashboard_routes, openapi_routes
from deployments.admission import AdmissionGate
from deployments.answer_meter import ApiMetrics
from deployments.answer_runs import Job
from deployments.answering import explained, service_of, streamed, whole
from deployments.api_service import ApiService, ApiSettings
from deployments.arrival import arrival_of
from deployments.chat_rendering import ChatRendering
from deployments.dialects import messages_routes, responses_routes, tokens_routes
from deployments.disconnects import ClientGoneError
from deployments.error_responses import error_response
from deployments.event_stream import events
from deployments.explain import routes as explain_routes
from deployments.key_check import ApiKeyCheck, caller_of, claimed_tenant, require_admin
from deployments.openapi import describe
from deployments.protocol.body import read_request
from deployments.protocol.errors import CONTEXT_LENGTH_EXCEEDED, ApiError, model_not_found
from deployments.protocol.requests import ChatRequest, CompletionRequest, GenerationRequest
from deployments.protocol.responses import Envelope, Usage, model_object
from deployments.protocol.schemas import ChatCompletion, Completion, Model, ModelList, Status
from deployments.ranking import best_answers
from deployments.rendering import (
    CompletionRendering,
    Rendering,
    whole_response,
)
from deployments.request_ids import RequestIds, request_id_headers

__all__ = ["ApiMetrics", "ApiService", "ApiSettings", "create_api"]

logger = logging.getLogger(__name__)

METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: what servers log for a client that closed the connection; nobody receives it
_CLIENT_CLOSED_REQUEST = 499
#: keys travel in headers, so pages need no cookies of ours
_CORS: dict[str, Any] = {
    "allow_methods": ("GET", "POST"),
    "allow_headers": ("*",),
    "expose_headers": ("x-request-id", "retry-after"),
}


def create_api(cors_origins: Collection[str] = (), *, behind_serve: bool = False) -> FastAPI:
    """The application; set `app.state.service` before the first request. Pages of `cors_origins` may ask ("*": all).

    `behind_serve`: Serve's proxy stands before it, and adds the header `x-request-id`.
    """
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, exception_handlers=_EXCEPTION_HANDLERS)
    # The last one added is the outermost: a preflight needs no key, and every response has its request's id.
    app.add_middleware(AdmissionGate)
    app.add_middleware(ApiKeyCheck)
    if cors_origins:
        app.add_middleware(CORSMiddleware, allow_origins=cors_origins, **_CORS)
    app.add_middleware(RequestIds, behind_serve=behind_serve)
    started_s = int(time.time())

    @app.head("/health", include_in_schema=False)
    @app.get("/health", **describe(None, Status))
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready", **describe(None, Status, also={503: "No worker answers"}, error=Status))
    async def ready(request: Request) -> Response:
        is_ready = await service_of(request).is_ready()
        return JSONResponse({"status": "ready" if is_ready else "not ready"}, 200 if is_ready else 503)

    @app.get("/metrics", response_class=PlainTextResponse, **describe(None, also={403: "The key is no admin's"}))
    async def metrics(request: Request) -> Response:
        service = service_of(request)
        require_admin(request, service.settings)
        return PlainTextResponse(await service.metrics_text(), media_type=METRICS_CONTENT_TYPE)

    @app.get("/v1/models", **describe(None, ModelList))
    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model(request, started_s)]})

    @app.get("/v1/models/{model_id:path}", **describe(None, Model, also={404: "There is no such model"}))
    async def model(request: Request, model_id: str) -> Response:
        settings = service_of(request).settings
        if model_id != settings.served_model_name:
            raise model_not_found(settings.served_model_name)
        return JSONResponse(_model(request, started_s))

    @app.post("/v1/completions", **describe(CompletionRequest, Completion, is_work=True, is_stream=True))
    async def completions(request: Request) -> Response:
        arrival_s = arrival_of(request)
        service = service_of(request)
        body = await read_request(request, CompletionRequest, service.settings.max_body_bytes)
        jobs = await service.completion_jobs(body, arrival_s, caller_of(request, service.settings))
        rendering = CompletionRendering(
            service.tokenizer.token_text,
            num_logprobs=body.num_logprobs,
            echo=bool(body.echo),
            num_prompt_logprobs=body.prompt_logprobs,
        )
        return await _answer(request, service, body, jobs, rendering)

    @app.post("/v1/chat/completions", **describe(ChatRequest, ChatCompletion, is_work=True, is_stream=True))
    async def chat_completions(request: Request) -> Response:
        arrival_s = arrival_of(request)
        service = service_of(request)
        body = await read_request(request, ChatRequest, service.settings.max_body_bytes)
        jobs = await service.chat_jobs(body, arrival_s, caller_of(request, service.settings))
        parts = service.chats.parts(body, jobs[0].request.prompt_token_ids)
        rendering = ChatRendering(
            service.tokenizer.token_text,
            with_logprobs=body.num_logprobs is not None,
            num_prompt_logprobs=body.prompt_logprobs,
            parts=parts,
        )
        return await _answer(request, service, body, jobs, rendering)

    app.include_router(tokens_routes.router)
    app.include_router(messages_routes.router)
    app.include_router(responses_routes.router)
    app.include_router(explain_routes.router)
    app.include_router(openapi_routes.router)
    app.include_router(dashboard_routes.router)
    return app


async def _answer(
    request: Request, service: ApiService, body: GenerationRequest, jobs: list[Job], rendering: Rendering
) -> Response:
    settings = service.settings
    response_id = jobs[0].request.request_id.removesuffix("-0")
    envelope = Envelope(response_id, int(time.time()), settings.served_model_name, settings.system_fingerprint)
    explanation = explained(request, service, response_id, body.explain)
    usage = Usage(prompt_tokens=sum(len(job.request.prompt_token_ids) for job in jobs))
    if body.stream:
        shown_usage = usage if body.include_usage else None
        return streamed(
            service,
            jobs,
            lambda deltas, state: events(deltas, rendering, envelope, shown_usage, state, explanation),
        )
    wholes = await whole(request, service, jobs)
    usage.completion_tokens = sum(whole.num_tokens for whole in wholes)
    usage.cached_tokens = sum(whole.num_cached_tokens for whole in wholes)
    if body.is_ranked:
        wholes = best_answers(wholes, body.num_candidates, body.num_choices)
    closing: dict[str, Any] = {"usage": usage.to_dict()} | (await explanation() if explanation else {})

    def render() -> Response:
        return JSONResponse(whole_response(rendering, envelope, wholes) | closing)

    # Those of a long prompt take longer than other requests should wait.
    return render() if body.num_prompt_logprobs is None else await asyncio.to_thread(render)


def _model(request: Request, created: int) -> dict[str, Any]:
    settings = service_of(request).settings
    return model_object(settings.served_model_name, created, settings.max_model_len)


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    if error.code == CONTEXT_LENGTH_EXCEEDED:
        service = service_of(request)
        service.count_rejection("too_long", claimed_tenant(request.scope, service.settings))
    return error_response(request.scope, error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Unknown routes and methods, and whatever else the framework refuses by itself."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers) if error.headers else None
    return error_response(request.scope, ApiError(error.status_code, str(error.detail), headers=headers))


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


async def _on_unexpected(request: Request, error: Exception) -> Response:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    headers = request_id_headers(request)  # the framework answers this one outside of all middleware
    return error_response(request.scope, ApiError(500, "internal error", code="internal_error", headers=headers))


_EXCEPTION_HANDLERS: dict[int | type[Exception], Any] = {
    ApiError: _on_api_error,
    HTTPException: _on_http_error,
    ClientGoneError: _on_client_gone,
    Exception: _on_unexpected,
}
