"""`/dashboard`, a page that anybody may load; what it shows, and the same as a trace, are opened by an admin's key."""

import asyncio
import json

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from deployments.answering import service_of
from deployments.key_check import require_admin
from deployments.protocol.errors import ApiError
from monitoring.chrome_trace import chrome_trace
from monitoring.dashboard_page import dashboard_page

router = APIRouter(include_in_schema=False)

MAX_TRACE_S = 3600


@router.get("/dashboard")
async def dashboard() -> Response:
    page = dashboard_page()
    return HTMLResponse(page.html, headers={"Content-Security-Policy": page.content_security_policy})


@router.get("/dashboard/data")
async def dashboard_data(request: Request, cursor: str = "0", store: str = "") -> Response:
    service = service_of(request)
    require_admin(request, service.settings)
    if not (cursor.isascii() and cursor.isdigit()) or len(cursor) > 18:
        raise ApiError(400, "cursor must be the number that the last answer gave", param="cursor")
    data = await service.dashboard_data(int(cursor), store)
    return JSONResponse(data, headers={"Cache-Control": "no-store"})


@router.get("/dashboard/trace")
async def dashboard_trace(request: Request, seconds: str = "60") -> Response:
    """Made off the event loop: an hour of steps is long."""
    service = service_of(request)
    require_admin(request, service.settings)
    if not (seconds.isascii() and seconds.isdigit()) or len(seconds) > 4 or not 1 <= int(seconds) <= MAX_TRACE_S:
        raise ApiError(400, f"seconds must be a whole number from 1 to {MAX_TRACE_S}", param="seconds")
    data = await service.dashboard_data(0, "")
    trace = await asyncio.to_thread(lambda: json.dumps(chrome_trace(data["steps"], data["now_ms"], int(seconds))))
    headers = {"Content-Disposition": 'attachment; filename="stallfree-trace.json"', "Cache-Control": "no-store"}
    return Response(trace, media_type="application/json", headers=headers)
