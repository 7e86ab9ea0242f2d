"""`Life`: what one request's time was spent on so far. Owns its parts in their order and keeps them few.

It is told where time went; it knows neither steps nor queues.
"""

from dataclasses import dataclass, field, replace
from enum import Enum

from scheduler.blockers import Actor
from scheduler.life_report import MAX_BLOCKERS, Blocker, ChunkSpan, LifePart, LifeReport, LostPlace

#: beyond these, what comes is added to the last one of its kind
MAX_PARTS = 48
MAX_CHUNKS = 64
MAX_PREEMPTIONS = 16
#: blockers of one part that are kept while it grows
_MAX_KNOWN_BLOCKERS = 64


class LifeState(Enum):
    """`QUEUED`: not let in yet. `THROWN_OUT`: preempted, and its cache thrown away."""

    QUEUED = "queue"
    PREFILL = "prefill"
    DECODE = "decode"
    THROWN_OUT = "preempted"
    SWAPPED = "swapped"


@dataclass(slots=True)
class _Part:
    name: str
    cause: str
    us: int = 0
    blockers: dict[str, tuple[Actor, int]] = field(default_factory=dict)

    def block(self, found: list[tuple[Actor, int]]) -> None:
        blockers = self.blockers
        for actor, us in found:
            _, known = blockers.get(actor.request_id, (actor, 0))
            blockers[actor.request_id] = (actor, known + us)
        if len(blockers) > _MAX_KNOWN_BLOCKERS:
            self.blockers = {actor.request_id: (actor, us) for actor, us in self._worst(MAX_BLOCKERS)}

    def _worst(self, count: int) -> list[tuple[Actor, int]]:
        return sorted(self.blockers.values(), key=lambda blocker: -blocker[1])[:count]

    def told(self) -> LifePart:
        named = [Blocker(actor.request_id, actor.tenant, us) for actor, us in self._worst(MAX_BLOCKERS) if us > 0]
        return LifePart(self.name, self.cause, self.us, named, self.us - sum(blocker.us for blocker in named))


@dataclass(slots=True, eq=False)
class Life:
    """Invariant: the parts sum to `mark_us - arrival_us`. `clocks` and `step` are those when its state began;
    `num_discarded_tokens`: so many of its first tokens had been computed when its cache was thrown away."""

    actor: Actor
    arrival_us: int
    mark_us: int
    num_rows: int
    num_prompt_tokens: int
    state: LifeState = LifeState.QUEUED
    cause: str = ""
    clocks: dict[str, int] = field(default_factory=dict)
    step: int = 0
    num_cached_tokens: int | None = None
    num_chunks: int = 0
    num_preemptions: int = 0
    num_discarded_tokens: int = 0
    chunks: list[ChunkSpan] = field(default_factory=list)
    preemptions: list[LostPlace] = field(default_factory=list)
    _parts: list[_Part] = field(default_factory=list)
    _stage_began: int = 0

    def enter(self, state: LifeState, cause: str, clocks: dict[str, int], step: int) -> None:
        self.state, self.cause, self.clocks, self.step = state, cause, clocks, step
        self._stage_began = len(self._parts)

    def add(self, name: str, cause: str, us: int, found: list[tuple[Actor, int]]) -> None:
        """`us` more of the request's time; the caller moves the mark."""
        if us == 0:
            return
        part = self._find(name, cause, self._stage_began)
        if part is None and len(self._parts) >= MAX_PARTS:
            part = self._find(name, cause, 0)
        if part is None:
            part = _Part(name, cause)
            self._parts.append(part)
        part.us += us
        if found:
            part.block(found)

    def _find(self, name: str, cause: str, first: int) -> _Part | None:
        for place in range(len(self._parts) - 1, first - 1, -1):
            part = self._parts[place]
            if part.name == name and part.cause == cause:
                return part
        return None

    def blame(self, name: str, cause: str, found: list[tuple[Actor, int]]) -> None:
        """Who stood in the way in the part of this name in the present state, known only at its end."""
        part = self._find(name, cause, self._stage_began) or self._find(name, cause, 0)
        if part is not None and found:
            part.block(found)

    def us_in_stage(self, name: str, cause: str) -> int:
        part = self._find(name, cause, self._stage_began)
        return 0 if part is None else part.us

    def add_chunk(self, chunk: ChunkSpan) -> None:
        self.num_chunks += 1
        if len(self.chunks) < MAX_CHUNKS:
            self.chunks.append(chunk)
        else:
            last = self.chunks[-1]
            last.end, last.step_us, last.own_us = chunk.end, last.step_us + chunk.step_us, last.own_us + chunk.own_us

    def add_prefill(self, chunk: ChunkSpan, us: int) -> None:
        """Time of its own in a chunk: that of tokens which had been computed before is a preemption's."""
        num_again = min(max(self.num_discarded_tokens - chunk.start, 0), chunk.end - chunk.start)
        again_us = us * num_again // (chunk.end - chunk.start)
        self.add("prefill", "recompute", again_us, [])
        self.add("prefill", "", us - again_us, [])

    def add_preemption(self, lost: LostPlace) -> None:
        self.num_preemptions += 1
        if len(self.preemptions) < MAX_PREEMPTIONS:
            self.preemptions.append(lost)

    def copied(self) -> "Life":
        """To be closed while this one goes on."""
        parts = [replace(part, blockers=part.blockers.copy()) for part in self._parts]
        return replace(self, chunks=self.chunks.copy(), preemptions=self.preemptions.copy(), _parts=parts)

    def report(self, *, is_over: bool) -> LifeReport:
        return LifeReport(
            self.mark_us - self.arrival_us,
            [part.told() for part in self._parts if part.us > 0],
            self.num_prompt_tokens,
            self.num_cached_tokens or 0,
            list(self.chunks),
            self.num_chunks,
            list(self.preemptions),
            self.num_preemptions,
            is_over,
        )
