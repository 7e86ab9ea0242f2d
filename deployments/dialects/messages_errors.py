"""What goes wrong, as Anthropic's error objects."""

from typing import Any

from deployments.protocol.errors import ApiError

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def messages_error_body(error: ApiError, request_id: str) -> dict[str, Any]:
    """The fields of `error` by Anthropic's names; which field was at fault stands in the message."""
    kind = _KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    is_named = error.param is None or error.param in error.message
    message = error.message if is_named else f"{error.param}: {error.message}"
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}
