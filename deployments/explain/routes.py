"""`GET /v1/requests/{id}/explain`."""

from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict
from starlette.responses import JSONResponse, Response

from deployments.answering import service_of
from deployments.key_check import caller_of
from deployments.openapi import describe

router = APIRouter()


class Explanation(BaseModel):
    """Where a request's time went. All times are milliseconds; `parts` sum to `end_to_end_ms`."""

    model_config = ConfigDict(extra="allow")

    object: str
    id: str
    status: str
    end_to_end_ms: float
    time_to_first_token_ms: float | None
    parts: list[dict[str, Any]]
    timeline: list[list[Any]]
    chunks: list[dict[str, Any]]
    preemptions: list[dict[str, Any]]
    cache: dict[str, Any]
    workers: list[dict[str, Any]]
    requests: list[str] | None = None


@router.get(
    "/v1/requests/{request_id:path}/explain",
    **describe(None, Explanation, also={404: "No such request is known, or it is another's"}),
)
async def explain(request: Request, request_id: str) -> Response:
    """`request_id`: of an answer's body, or of its `x-request-id`, which is the client's own and may hold slashes."""
    service = service_of(request)
    settings = service.settings
    caller = caller_of(request, settings)
    found = await service.explain.explanation(request_id, caller, has_keys=settings.keys is not None)
    return JSONResponse(found)
