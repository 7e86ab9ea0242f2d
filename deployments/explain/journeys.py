"""`Journeys`: the requests of one ingress that are under way, and the explanations of those that have ended.

Owns what is kept here and what is on its way to the metrics actor, both bounded. Knows no HTTP and no Ray.
"""

import asyncio
import json
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from typing import Any

from deployments.explain.explanation import Owner, explanation_of
from deployments.explain.journey import Journey
from deployments.keys import Caller
from monitoring.explanation_store import StoredExplanation
from scheduler.life_report import LifeReport

logger = logging.getLogger(__name__)

#: explanations that wait for the metrics actor; beyond it the oldest are lost to it
MAX_WAITING = 4096
#: that are kept here, for questions that come at once
MAX_KEPT = 256
#: how long a worker may take to say what it knows: it answers between two steps
ASK_TIMEOUT_S = 2.0

#: asks the worker (replica id) of an attempt (its request id); None: it does not know, or does not answer
AskLife = Callable[[str, str], Awaitable[LifeReport | None]]


async def nobody_answers(request_id: str, replica_id: str) -> LifeReport | None:
    """Where there is nobody to ask."""
    return None

#: told of each request that ended: its explanation, its client's `traceparent` or "", milliseconds since its end
Listener = Callable[[dict[str, Any], str, float], None]


class Journeys:
    """Used on the event loop of its ingress alone."""

    def __init__(
        self,
        ask_life: AskLife = nobody_answers,
        clock: Callable[[], float] = time.monotonic,
        listeners: Collection[Listener] = (),
    ) -> None:
        self._ask_life = ask_life
        self._listeners = tuple(listeners)
        self._clock = clock
        self._open: dict[str, Journey] = {}
        self._ending: dict[str, asyncio.Task[None]] = {}
        self._kept: OrderedDict[str, StoredExplanation] = OrderedDict()
        self._waiting: deque[StoredExplanation] = deque(maxlen=MAX_WAITING)

    def begin(self, request_id: str, arrival_s: float, num_prompt_tokens: int, caller: Caller) -> Journey:
        """A request whose tokens are known. Several prompts of one call have a number behind the call's id."""
        call_id, _, number = request_id.rpartition("-")
        aliases = [caller.http_request_id, call_id if number.isdigit() and len(number) < 6 else ""]
        journey = Journey(
            request_id,
            arrival_s,
            num_prompt_tokens,
            caller,
            tuple(alias for alias in aliases if alias and alias != request_id),
            self._clock,
        )
        journey.begin()
        self._open[request_id] = journey
        return journey

    def of(self, request_id: str) -> Journey:
        """Of a request under way; one that nobody asked for is followed all the same."""
        return self._open.get(request_id) or Journey(request_id, self._clock(), 0, clock=self._clock)

    def end(self, journey: Journey, status: str) -> None:
        """Its answer is over. The worker may have to be asked first; that holds up nobody."""
        journey.end(status)
        if journey.request_id not in self._ending:
            self._ending[journey.request_id] = asyncio.create_task(self._finish(journey))

    async def _finish(self, journey: Journey) -> None:
        try:
            await self._complete(journey)
            explanation = explanation_of(journey)
            kept = _stored(journey, explanation)
            self._keep(kept)
            for listener in self._listeners:
                listener(explanation, journey.caller.traceparent, (self._clock() - kept["ended_s"]) * 1e3)
        except Exception:
            logger.exception("request %s cannot be explained", journey.request_id)
        finally:
            self._open.pop(journey.request_id, None)
            self._ending.pop(journey.request_id, None)

    async def _complete(self, journey: Journey) -> None:
        """Ask the last worker for what it has not told."""
        if not journey.lacks_life:
            return
        attempt = journey.attempts[-1]
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                attempt.life = await self._ask_life(attempt.request_id, attempt.replica_id) or attempt.life
        except TimeoutError:
            logger.warning("request %s: its worker does not say what became of it", journey.request_id)

    def _keep(self, explanation: StoredExplanation) -> None:
        self._kept[explanation["id"]] = explanation
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        self._waiting.append(explanation)

    # -- questions -----------------------------------------------------------------------------------------------

    async def find(self, request_id: str) -> list[StoredExplanation]:
        """Of all requests of this ingress with this id, or alias, under way or just ended. Their workers are asked at
        once: one that hangs takes its time but once."""
        journeys = [j for j in self._open.values() if request_id in (j.request_id, *j.aliases)]
        endings = [self._ending.get(journey.request_id) for journey in journeys]
        _, running = await asyncio.gather(
            asyncio.gather(*(asyncio.shield(ending) for ending in endings if ending is not None)),
            asyncio.gather(
                *(self.so_far(journey) for journey, ending in zip(journeys, endings, strict=True) if ending is None)
            ),
        )
        return running + [e for e in self._kept.values() if request_id in (e["id"], *e["aliases"])]

    async def so_far(self, journey: Journey) -> StoredExplanation:
        """Of a request that goes on, as its worker sees it now."""
        seen = replace(journey, attempts=[replace(attempt) for attempt in journey.attempts])
        await self._complete(seen)
        return _stored(seen, explanation_of(seen))

    @property
    def num_open(self) -> int:
        return len(self._open)

    def take_waiting(self) -> list[StoredExplanation]:
        """What the metrics actor has not been given; who takes it and fails puts it back."""
        now_s = self._clock()
        taken: list[StoredExplanation] = [{**e, "ended_s": now_s - e["ended_s"]} for e in self._waiting]
        self._waiting.clear()
        return taken

    def put_back(self, explanations: list[StoredExplanation]) -> None:
        now_s = self._clock()
        kept = explanations[: MAX_WAITING - len(self._waiting)]
        self._waiting.extendleft({**e, "ended_s": now_s - e["ended_s"]} for e in reversed(kept))


def _stored(journey: Journey, explanation: dict[str, Any]) -> StoredExplanation:
    owner = Owner.of(journey.caller)
    return {
        "id": journey.request_id,
        "aliases": list(journey.aliases),
        "tenant": owner.tenant,
        "key_id": owner.key_id,
        "text": json.dumps(explanation, separators=(",", ":")),
        "ended_s": journey.arrival_s + (journey.now_us() if journey.end_us is None else journey.end_us) / 1e6,
    }


def parsed(explanation: StoredExplanation) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(explanation["text"])
    return value
