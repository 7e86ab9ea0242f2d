"""Fair shares among tenants: a virtual counter of the service each has had, weighted.

After "Fairness in Serving Large Language Models" (OSDI 2024): the waiting tenant with the smallest counter goes
first, and a tenant that comes back is lifted to the others, so that idling earns no credit.
"""

from collections.abc import Mapping

#: a generated token costs about twice a prompt token
PREFILL_TOKEN_COST = 1.0
DECODE_TOKEN_COST = 2.0
#: beyond so many, tenants that were served less than those that wait are forgotten
MAX_TENANTS_REMEMBERED = 1024


class FairShare:
    """Counters by tenant, in cost units divided by the tenant's weight."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._counters: dict[str, float] = {}
        self._last_served = 0.0

    def counter(self, tenant: str) -> float:
        return self._counters.get(tenant, 0.0)

    def lift(self, tenant: str, waiting_tenants: list[str]) -> None:
        """`tenant` had nothing waiting and now has: it starts level with the least served of those that wait."""
        level = min((self.counter(other) for other in waiting_tenants), default=self._last_served)
        self._counters[tenant] = max(self.counter(tenant), level)
        if len(self._counters) > MAX_TENANTS_REMEMBERED:
            # Those level with or behind the one that comes back would be lifted in any case.
            self._counters = {other: c for other, c in self._counters.items() if c > level or other == tenant}

    def charge_prefill(self, tenant: str, num_tokens: int) -> None:
        """A prompt's tokens are charged when it is admitted; a negative count gives back what was not computed."""
        self._charge(tenant, num_tokens * PREFILL_TOKEN_COST)

    def charge_decode(self, tenant: str, num_tokens: int) -> None:
        self._charge(tenant, num_tokens * DECODE_TOKEN_COST)

    def _charge(self, tenant: str, cost: float) -> None:
        counter = self.counter(tenant) + cost / self._weights.get(tenant, 1.0)
        self._counters[tenant] = counter
        self._last_served = counter
