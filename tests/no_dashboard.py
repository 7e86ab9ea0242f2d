"""A dashboard's source for servers without a metrics actor: nothing has happened."""

from monitoring.metrics_actor import DashboardData, Window


class NoDashboard:
    async def now(self, cursor: int, store_id: str, num_requests: int) -> DashboardData:
        nothing = {"store_id": "none", "cursor": 0, "rows": {}}
        return {"now_ms": 0.0, "now": {"workers": [], "totals": {}}, "steps": nothing, "newest": []}

    async def window(self, seconds: float, num_requests: int) -> Window:
        return {"rows": {}, "newest": []}
