"""Where API keys are asked for: an ASGI middleware over every route, and what it found, for the routes."""

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.error_responses import error_response, route_path
from deployments.keys import Caller
from deployments.protocol.errors import ApiError
from deployments.tenants import tenant_of

if TYPE_CHECKING:
    from deployments.api_service import ApiSettings

#: whole paths, for probes, and a page without data; whatever is not named here wants a key
OPEN_ROUTES = frozenset({"/health", "/ready", "/dashboard"})
_SCHEME = "bearer "
#: of version 00, which is all there is
_TRACEPARENT_CHARS = 55


class ApiKeyCheck:
    """ASGI middleware. The key comes as `Authorization: Bearer KEY` or as `x-api-key: KEY`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        keys = scope["app"].state.service.settings.keys
        if keys is not None and route_path(scope) not in OPEN_ROUTES:
            given = _given_key(Headers(scope=scope))
            caller = None if given is None else keys.caller_of(given)
            if caller is None:
                await error_response(scope, _unauthorized(is_given=given is not None))(scope, receive, send)
                return
            scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, send)


def caller_of(request: Request, settings: "ApiSettings") -> Caller:
    """Whose request it is: its key's tenant, or without keys the tenant that the header names. Asked for when the body
    has been read."""
    caller: Caller | None = getattr(request.state, "caller", None)
    if caller is None:
        caller = Caller(tenant_of(request.headers, settings.tenant_header))
    return replace(
        caller,
        http_request_id=request.state.request_id,
        read_s=time.monotonic(),
        traceparent=request.headers.get("traceparent", "")[:_TRACEPARENT_CHARS],
    )


def claimed_tenant(scope: Scope, settings: "ApiSettings") -> str:
    """The same for calls that are turned away: what the header says is taken as it is."""
    caller: Caller | None = scope.get("state", {}).get("caller")
    if caller is not None:
        return caller.tenant
    return Headers(scope=scope).get(settings.tenant_header, "") if settings.tenant_header else ""


def require_admin(request: Request, settings: "ApiSettings") -> None:
    """Raises ApiError unless the key is an admin's. Without keys everybody is one."""
    if settings.keys is not None and not request.state.caller.is_admin:
        raise ApiError(403, "this needs an admin's API key", code="insufficient_permissions")


def _given_key(headers: Headers) -> str | None:
    authorization = headers.get("authorization", "")
    if authorization[: len(_SCHEME)].lower() == _SCHEME:
        return authorization[len(_SCHEME) :].strip()
    return headers.get("x-api-key")


def _unauthorized(*, is_given: bool) -> ApiError:
    message = (
        "the API key is not one of this server's"
        if is_given
        else "no API key was given; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
    )
    return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
