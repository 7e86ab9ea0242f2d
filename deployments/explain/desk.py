"""`ExplainDesk`: answers why a request took as long as it did, whoever runs or ran it, to whoever may know.

Looks here first, then where all ingresses' explanations are kept. Knows no routes and no Ray.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from deployments.explain.explanation import Owner, shown_to
from deployments.explain.journeys import Journeys, parsed
from deployments.keys import Caller
from deployments.protocol.errors import ApiError
from monitoring.explanation_store import MAX_EXPLANATIONS, StoredExplanation

#: a request of another ingress is told of with that one's next report
ELSEWHERE_TIMEOUT_S = 3.0
_ELSEWHERE_PERIOD_S = 0.25

#: (explanations, whether another ingress may yet have one)
FindElsewhere = Callable[[str], Awaitable[tuple[list[StoredExplanation], bool]]]


async def no_others(request_id: str) -> tuple[list[StoredExplanation], bool]:
    """Where there is but this ingress."""
    return [], False


class ExplainDesk:
    def __init__(self, journeys: Journeys, find_elsewhere: FindElsewhere) -> None:
        self.journeys = journeys
        self._find_elsewhere = find_elsewhere

    async def explanation(self, request_id: str, caller: Caller, *, has_keys: bool) -> dict[str, Any]:
        """Raises ApiError (404) where nothing is known of it, or it is not the caller's to read.

        Of several requests (the prompts of one call) the longest is explained, and `requests` names them all.
        """
        may_read_all = not has_keys or caller.is_admin
        found = await self._find(request_id, lambda e: may_read_all or _owner(e).is_of(caller))
        if not found:
            raise _unknown()
        exact = [e for e in found if e["id"] == request_id]
        explanations = [parsed(explanation) for explanation in exact or found]
        longest = max(explanations, key=lambda explanation: float(explanation["end_to_end_ms"]))
        if len(explanations) > 1:
            longest["requests"] = [explanation["id"] for explanation in explanations]
        return shown_to(longest, None if may_read_all else caller)

    async def explanation_if_known(self, request_id: str, caller: Caller, *, has_keys: bool) -> dict[str, Any] | None:
        """For an answer that carries it along and must not fail for the lack of it."""
        try:
            return await self.explanation(request_id, caller, has_keys=has_keys)
        except ApiError:
            return None

    async def _find(
        self, request_id: str, may_be_read: Callable[[StoredExplanation], bool]
    ) -> list[StoredExplanation]:
        """Of those that may be read: others chose the same id, perhaps."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + ELSEWHERE_TIMEOUT_S
        while True:
            if here := [e for e in await self.journeys.find(request_id) if may_be_read(e)]:
                return here
            elsewhere, is_perhaps_elsewhere = await self._find_elsewhere(request_id)
            found = [e for e in elsewhere if may_be_read(e)]
            if found or not is_perhaps_elsewhere or loop.time() >= deadline_s:
                return found
            await asyncio.sleep(_ELSEWHERE_PERIOD_S)


def _owner(explanation: StoredExplanation) -> Owner:
    return Owner(explanation["tenant"], explanation["key_id"])


def _unknown() -> ApiError:
    return ApiError(
        404,
        f"no request with this id is known to this key: it was never here, or is not among the newest "
        f"{MAX_EXPLANATIONS}, whose explanations are kept",
        param="request_id",
        code="request_not_found",
    )
