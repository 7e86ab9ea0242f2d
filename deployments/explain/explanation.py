"""An explanation as clients read it, and what of it somebody else may read. Numbers are milliseconds."""

from dataclasses import dataclass
from typing import Any

from deployments.explain.journey import Attempt, Journey
from deployments.explain.stitching import stitched
from deployments.keys import Caller
from scheduler.life_report import MAX_BLOCKERS, Blocker, LifePart

PART_NAMES = (
    "tokenize",
    "route",
    "queue",
    "prefill",
    "interference",
    "preempted",
    "swapped",
    "decode",
    "transport",
    "deliver",
    "failover",
    "other",
)
MAX_TIMELINE = 96
#: stands for requests of other tenants
MASK = "another tenant's request"


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose request it is: of a tenant, or else of a key."""

    tenant: str
    key_id: str

    @classmethod
    def of(cls, caller: Caller) -> "Owner":
        return cls(caller.tenant, caller.key_id)

    def is_of(self, caller: Caller) -> bool:
        return self.tenant == caller.tenant if self.tenant else self.key_id == caller.key_id and not caller.tenant


def explanation_of(journey: Journey) -> dict[str, Any]:
    """Blockers carry their tenants: `shown_to` takes them out."""
    timeline, total_us = stitched(journey)
    lives = [attempt.life for attempt in journey.attempts if attempt.life is not None]
    return {
        "object": "request.explanation",
        "id": journey.request_id,
        "status": journey.status,
        "end_to_end_ms": _ms(total_us),
        "time_to_first_token_ms": None if journey.first_token_us is None else _ms(journey.first_token_us),
        "parts": [_part(part) for part in _gathered(timeline)],
        "timeline": [[part.name, part.cause, _ms(part.us)] for part in _few(timeline)],
        "chunks": [
            {"start": c.start, "end": c.end, "ms": _ms(c.own_us), "step_ms": _ms(c.step_us), "step_id": c.step_id}
            for life in lives
            for c in life.chunks
        ],
        "preemptions": [
            {
                "at_ms": _ms(lost.at_us),
                "mode": lost.mode,
                "reason": lost.reason,
                "beneficiary": None
                if _public_id(lost.beneficiary) == _public_id(journey.request_id)
                else {"id": _public_id(lost.beneficiary), "tenant": lost.beneficiary_tenant},
                "blocks": lost.num_blocks,
                "discarded_tokens": lost.num_discarded_tokens,
            }
            for life in lives
            for lost in life.preemptions
        ],
        "cache": {
            "prompt_tokens": journey.num_prompt_tokens,
            "cached_tokens": lives[0].num_cached_tokens if lives else 0,
        },
        "workers": [_worker(attempt) for attempt in journey.attempts],
    }


def shown_to(explanation: dict[str, Any], caller: Caller | None) -> dict[str, Any]:
    """Without the names of other tenants' requests; None: to somebody who may read everything."""

    def shown(blocker: dict[str, Any]) -> dict[str, Any]:
        is_own = caller is None or (caller.tenant and blocker["tenant"] == caller.tenant)
        name = blocker["id"] if is_own else MASK
        return {"id": name} | {key: value for key, value in blocker.items() if key not in ("id", "tenant")}

    parts = [part | {"blockers": [shown(b) for b in part["blockers"]]} for part in explanation["parts"]]
    preemptions = [
        p | {"beneficiary": None if p["beneficiary"] is None else shown(p["beneficiary"])["id"]}
        for p in explanation["preemptions"]
    ]
    return explanation | {"parts": parts, "preemptions": preemptions}


def _gathered(timeline: list[LifePart]) -> list[LifePart]:
    """One part for each name and cause, by name in a fixed order and the longest first."""
    parts: dict[tuple[str, str], LifePart] = {}
    blockers: dict[tuple[str, str], dict[str, Blocker]] = {}
    for part in timeline:
        key = part.name, part.cause
        whole = parts.setdefault(key, LifePart(part.name, part.cause, 0))
        whole.us += part.us
        for blocker in part.blockers:
            known = blockers.setdefault(key, {}).setdefault(
                blocker.request_id, Blocker(blocker.request_id, blocker.tenant, 0)
            )
            known.us += blocker.us
    for key, whole in parts.items():
        worst = sorted(blockers.get(key, {}).values(), key=lambda blocker: -blocker.us)
        whole.blockers = worst[:MAX_BLOCKERS]
        whole.others_us = whole.us - sum(blocker.us for blocker in whole.blockers)
    return sorted(parts.values(), key=lambda part: (PART_NAMES.index(part.name), -part.us))


def _few(timeline: list[LifePart]) -> list[LifePart]:
    """The shortest neighbours are added up where there are too many."""
    few = list(timeline)
    while len(few) > MAX_TIMELINE:
        place = min(range(len(few) - 1), key=lambda i: few[i].us + few[i + 1].us)
        one, other = few[place], few.pop(place + 1)
        longer = one if one.us >= other.us else other
        few[place] = LifePart(longer.name, longer.cause, one.us + other.us)
    return few


def _part(part: LifePart) -> dict[str, Any]:
    named = [{"id": _public_id(b.request_id), "tenant": b.tenant, "ms": _ms(b.us)} for b in part.blockers]
    rest = {"others_ms": _ms(part.others_us)} if named and part.others_us else {}
    return {"name": part.name, "ms": _ms(part.us), "cause": part.cause or None, "blockers": named} | rest


def _worker(attempt: Attempt) -> dict[str, Any]:
    return {"worker": attempt.worker, "replica": attempt.replica_id or None, "lost": attempt.lost}


def _public_id(request_id: str) -> str:
    """A further attempt counts as the request itself."""
    return request_id.partition("~")[0]


def _ms(us: int) -> float:
    return us / 1000
