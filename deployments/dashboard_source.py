"""Where the dashboard's data comes from: the protocol that its routes use, and the metrics actor behind it."""

from typing import Any, Protocol

from monitoring.metrics_actor import DashboardData, Window


class DashboardSource(Protocol):
    async def now(self, cursor: int, store_id: str, num_requests: int) -> DashboardData: ...

    async def window(self, seconds: float, num_requests: int) -> Window: ...


class ActorDashboard:
    """`actor` is the metrics actor's handle."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def now(self, cursor: int, store_id: str, num_requests: int) -> DashboardData:
        data: DashboardData = await self._actor.dashboard.remote(cursor, store_id, num_requests)
        return data

    async def window(self, seconds: float, num_requests: int) -> Window:
        window: Window = await self._actor.window.remote(seconds, num_requests)
        return window
