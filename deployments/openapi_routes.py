"""`/openapi.json` and `/docs`."""

from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import HTMLResponse, JSONResponse, Response

from deployments.dialects.messages_body import CountTokensRequest, MessagesRequest
from deployments.dialects.responses_body import ResponsesRequest
from deployments.dialects.tokens_body import DetokenizeRequest, TokenizeRequest
from deployments.docs_page import CONTENT_SECURITY_POLICY, docs_page
from deployments.openapi import document
from deployments.protocol.requests import ChatRequest, CompletionRequest

router = APIRouter(include_in_schema=False)

_BODIES: list[type[BaseModel]] = [
    CompletionRequest,
    ChatRequest,
    ResponsesRequest,
    MessagesRequest,
    CountTokensRequest,
    TokenizeRequest,
    DetokenizeRequest,
]


@router.get("/openapi.json")
async def openapi(request: Request) -> Response:
    return JSONResponse(_document_of(request))


@router.get("/docs")
async def docs(request: Request) -> Response:
    headers = {"Content-Security-Policy": CONTENT_SECURITY_POLICY}
    return HTMLResponse(docs_page(_document_of(request)), headers=headers)


def _document_of(request: Request) -> dict[str, Any]:
    """Made once, when it is first asked for."""
    app = request.app
    if app.openapi_schema is None:
        app.openapi_schema = document(app, _BODIES)
    schema: dict[str, Any] = app.openapi_schema
    return schema
