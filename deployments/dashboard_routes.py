"""`/dashboard`, a page that anybody may load; what it shows, and the same as a trace, are opened by an admin's key."""

import asyncio
import json
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from deployments.answering import service_of
from deployments.explain.journeys import parsed
from deployments.key_check import require_admin
from deployments.protocol.errors import ApiError
from monitoring.chrome_trace import Life, chrome_trace
from monitoring.dashboard_page import dashboard_page
from monitoring.explanation_store import StoredExplanation

router = APIRouter(include_in_schema=False)

MAX_TRACE_S = 3600
#: requests of the page, and of a trace
NUM_LISTED = 40
NUM_TRACED = 2000


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
    data = await service.dashboard.now(int(cursor), store, NUM_LISTED)
    shown = {"now_ms": data["now_ms"], "now": data["now"], "steps": data["steps"]}
    requests = [_summary(explanation) for explanation in data["newest"]]
    return JSONResponse(shown | {"requests": requests}, headers={"Cache-Control": "no-store"})


@router.get("/dashboard/trace")
async def dashboard_trace(request: Request, seconds: str = "60") -> Response:
    """Made off the event loop: an hour of steps is long."""
    service = service_of(request)
    require_admin(request, service.settings)
    if not (seconds.isascii() and seconds.isdigit()) or len(seconds) > 4 or not 1 <= int(seconds) <= MAX_TRACE_S:
        raise ApiError(400, f"seconds must be a whole number from 1 to {MAX_TRACE_S}", param="seconds")
    window = await service.dashboard.window(float(seconds), NUM_TRACED)

    def made() -> str:
        lives = [Life(e["id"], e["ended_s"] * 1e3, parsed(e)["timeline"]) for e in window["newest"]]
        return json.dumps(chrome_trace(window["rows"], lives))

    trace = await asyncio.to_thread(made)
    headers = {"Content-Disposition": 'attachment; filename="stallfree-trace.json"', "Cache-Control": "no-store"}
    return Response(trace, media_type="application/json", headers=headers)


def _summary(explanation: StoredExplanation) -> dict[str, Any]:
    """What the list shows; the rest is asked for when somebody opens it."""
    whole = parsed(explanation)
    parts = [{"name": part["name"], "ms": part["ms"]} for part in whole["parts"]]
    return {name: whole[name] for name in ("id", "status", "end_to_end_ms")} | {"parts": parts}
