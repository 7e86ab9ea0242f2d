"""`/dashboard`, a page that anybody may load, and `/dashboard/data`, which an admin's key opens."""

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from deployments.answering import service_of
from deployments.key_check import require_admin
from deployments.protocol.errors import ApiError
from monitoring.dashboard_page import dashboard_page

router = APIRouter(include_in_schema=False)


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
