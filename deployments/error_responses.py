"""Errors as responses, in the shape that the clients of a route expect. Knows routes by their paths alone."""

from starlette.responses import JSONResponse
from starlette.types import Scope

from deployments.dialects.messages_errors import messages_error_body
from deployments.protocol.errors import ApiError

MESSAGES_PATH = "/v1/messages"


def error_response(scope: Scope, error: ApiError) -> JSONResponse:
    if is_messages_path(route_path(scope)):
        request_id = scope.get("state", {}).get("request_id", "")
        return JSONResponse(messages_error_body(error, request_id), error.status, error.headers)
    return JSONResponse(error.body, error.status, error.headers)


def route_path(scope: Scope) -> str:
    """The path as routes name it: below the prefix that the server gave the application, if any."""
    path: str = scope["path"]
    prefix: str = scope.get("root_path", "")
    return path.removeprefix(prefix) if path.startswith(prefix + "/") else path


def is_messages_path(path: str) -> bool:
    return path == MESSAGES_PATH or path.startswith(MESSAGES_PATH + "/")
