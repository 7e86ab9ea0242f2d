"""The OpenAPI page: what each route takes and answers, from the very models that check bodies.

Bodies are parsed by hand, off the event loop, so the framework cannot know them: `describe` tells it of one route, and
`document` adds what the routes share. Knows no values.
"""

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from deployments.key_check import OPEN_ROUTES
from deployments.protocol.schemas import ErrorResponse

_REF = "#/components/schemas/{model}"
_DESCRIPTION = (
    "OpenAI's completions, chat completions and responses, Anthropic's messages, and tokens. Unknown fields of a "
    "request are ignored."
)
#: what every route that takes a body can answer
_WITH_BODY = {
    400: "What the request asks is wrong, or more than this server does",
    404: "There is no such model",
    413: "The body is too large",
}
_WITH_WORK = {
    429: "The server has as much to do as it takes on",
    500: "The answer failed",
    503: "No worker can answer",
    504: "The request's time has passed",
}


def describe(
    body: type[BaseModel] | None,
    answer: type[BaseModel] | None = None,
    *,
    is_work: bool = False,
    is_stream: bool = False,
    error: type[BaseModel] = ErrorResponse,
    also: dict[int, str] | None = None,
) -> dict[str, Any]:
    """Keyword arguments of a route: its body and answer (None: no JSON); whether workers make the answer, and perhaps
    as server-sent events; the shape of its errors, and which it has beside those that all such routes have."""
    errors = {401: "There is no API key, or a wrong one"} | (also or {})
    if body is not None:
        errors |= _WITH_BODY
    if is_work:
        errors |= _WITH_WORK
    answers: dict[int, Any] = {200: {"description": "The answer"} | ({} if answer is None else {"model": answer})}
    if is_stream:
        answers[200]["content"] = {"text/event-stream": {"schema": {"type": "string"}}}
    described: dict[str, Any] = {
        "responses": answers | {status: {"model": error, "description": text} for status, text in errors.items()}
    }
    if body is not None:
        content = {"application/json": {"schema": {"$ref": _REF.format(model=body.__name__)}}}
        described["openapi_extra"] = {"requestBody": {"required": True, "content": content}}
    return described


def document(app: FastAPI, bodies: Sequence[type[BaseModel]]) -> dict[str, Any]:
    """The whole page. `bodies` are those that routes were described with."""
    page = get_openapi(title="Stallfree", version=version("stallfree"), description=_DESCRIPTION, routes=app.routes)
    _, definitions = models_json_schema([(body, "validation") for body in bodies], ref_template=_REF)
    schemas = page["components"]["schemas"]
    schemas.update(definitions["$defs"])
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    page["components"]["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    for path, operations in page["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # the framework's own checks, of which no route has any
            if path in OPEN_ROUTES:
                del operation["responses"]["401"]
            else:
                operation["security"] = [{"bearer": []}, {"header": []}]
    return page
