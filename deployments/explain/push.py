"""Explanations on their way to the metrics actor, and back from it. Knows its methods, nothing of what is explained."""

import asyncio
import logging
from typing import Any

from deployments.explain.journeys import Journeys
from monitoring.explanation_store import StoredExplanation

logger = logging.getLogger(__name__)

#: a push that takes longer is tried again with the next one
_TIMEOUT_S = 5.0


class ExplanationPusher:
    """`source` names this ingress. Failures disturb nobody."""

    def __init__(self, actor: Any, source: str, journeys: Journeys) -> None:
        self._actor = actor
        self._source = source
        self._journeys = journeys
        self._is_failing = False
        self._had_requests = False

    async def push(self) -> None:
        """What has ended since the last time; and of what goes on, what other ingresses were asked for."""
        has_requests = self._journeys.num_open > 0
        ended = self._journeys.take_waiting()
        if not (ended or has_requests or self._had_requests):
            return
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                wanted: list[str] = await self._actor.put_explanations.remote(self._source, ended, has_requests)
                ended = []
                # At once: what waits for a worker that hangs holds up no other answer, and not the next push.
                await asyncio.gather(*(self._answer(request_id) for request_id in wanted))
        except Exception as error:
            self._journeys.put_back(ended)
            if not self._is_failing:
                logger.warning("explanations are not delivered: %r", error)
            self._is_failing = True
        else:
            self._is_failing = False
            self._had_requests = has_requests

    async def _answer(self, request_id: str) -> None:
        if running := await self._journeys.find(request_id):
            await self._actor.answer_explanation.remote(request_id, running)

    async def find(self, request_id: str) -> tuple[list[StoredExplanation], bool]:
        """As `ExplanationStore.find`; nothing where the actor does not answer."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                found: tuple[list[StoredExplanation], bool] = await self._actor.find_explanations.remote(
                    self._source, request_id
                )
                return found
        except Exception as error:
            logger.warning("explanations cannot be asked for: %r", error)
            return [], False
