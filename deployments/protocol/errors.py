"""What goes wrong at the edge, as OpenAI error objects. Texts name fields and numbers, never what a client wrote."""

import math
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

#: what an error text says after a validator's own message starts with these words
_VALIDATOR_PREFIX = "Value error, "

#: in place of a validator's words that name what is only known here
_PLAIN_WORDS = {"model_type": "must be an object", "dict_type": "must be an object"}

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
#: where nothing tells how long it will take
RETRY_AFTER_S = 1


class ApiError(Exception):
    """Ends a request with an HTTP status and an error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers

    @property
    def body(self) -> dict[str, Any]:
        return error_body(self.message, self.status, self.param, self.code)


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """The same error for clients that know its field by another name."""
    if error.param is None or error.param not in names:
        return error
    param = names[error.param]
    message = error.message
    if message.startswith(f"{error.param}:"):
        message = param + message.removeprefix(error.param)
    return ApiError(error.status, message, param=param, code=error.code, headers=error.headers)


def error_body(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    if status >= 500:
        kind = "server_error"
    elif status == 404:
        kind = "not_found_error"
    elif status == 429:
        kind = "rate_limit_error"
    else:
        kind = "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def not_supported(param: str, what: str) -> ApiError:
    """`what` may end with a hint after a semicolon, such as "functions; use tools instead"."""
    what, semicolon, hint = what.partition(";")
    message = f"{param}: {what} is not supported{semicolon}{hint}"
    return ApiError(400, message, param=param, code="unsupported_parameter")


def model_not_found(served_model_name: str) -> ApiError:
    return ApiError(
        404,
        f"the model does not exist; this server serves '{served_model_name}'",
        param="model",
        code="model_not_found",
    )


def context_length_exceeded(num_prompt_tokens: int, max_tokens: int, max_model_len: int, param: str) -> ApiError:
    """`max_tokens` is what the request needs at least: 1 where it named no limit."""
    return bad_request(
        f"the model's context is {max_model_len} tokens, but the prompt has {num_prompt_tokens} tokens and the "
        f"answer may need {max_tokens}: {num_prompt_tokens + max_tokens} in all",
        param,
        CONTEXT_LENGTH_EXCEEDED,
    )


def overloaded(retry_after_s: float) -> ApiError:
    """Every worker's queue is full; one may have room in so many seconds."""
    seconds = max(math.ceil(retry_after_s), 1)
    return ApiError(
        429,
        f"the queues of all workers are full; there may be room in {seconds} s",
        code="queue_full",
        headers={"Retry-After": str(seconds)},
    )


def too_many_open_requests(max_open_requests: int) -> ApiError:
    return ApiError(
        429,
        f"{max_open_requests} requests are open here, which is the limit",
        code="too_many_open_requests",
        headers={"Retry-After": str(RETRY_AFTER_S)},
    )


def unavailable(message: str) -> ApiError:
    return ApiError(503, message, code="worker_unavailable", headers={"Retry-After": str(RETRY_AFTER_S)})


def server_stopping() -> ApiError:
    return ApiError(503, "the server is stopping", code="server_stopping", headers={"Retry-After": str(RETRY_AFTER_S)})


def deadline_passed(timeout_s: float) -> ApiError:
    return ApiError(504, f"the answer was not done within its {timeout_s:g} s", param="timeout", code="timeout")


def from_validation(error: ValidationError, body: Mapping[str, Any]) -> ApiError:
    """The first thing wrong with a body, by the name of its field."""
    first = error.errors(include_input=False, include_url=False, include_context=False)[0]
    param = _param(first["loc"], body, is_missing=first["type"] == "missing")
    message = _PLAIN_WORDS.get(first["type"]) or first["msg"].removeprefix(_VALIDATOR_PREFIX)
    return bad_request(f"{param or 'body'}: {message}", param or None)


def _param(loc: tuple[int | str, ...], body: Mapping[str, Any], *, is_missing: bool) -> str:
    """The place in the body. A validator's path also names the types that it tried there, which are no part of it."""
    param = ""
    value: Any = body
    for position, part in enumerate(loc, 1):
        if isinstance(part, int):
            param += f"[{part}]"
            value = value[part] if isinstance(value, list) and part < len(value) else None
        elif (isinstance(value, Mapping) and part in value) or (is_missing and position == len(loc)):
            param += f".{part}" if param else part
            value = value.get(part) if isinstance(value, Mapping) else None
    return param
