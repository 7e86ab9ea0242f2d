"""What a request's time on one engine was made of: plain durations and ids, in the order in which they passed.

Knows no clock: everything is in microseconds since the request came. It crosses processes in the last frame.
"""

from dataclasses import dataclass, field

#: requests that a part names; what the others took is counted in `others_us`
MAX_BLOCKERS = 5


@dataclass(slots=True)
class Blocker:
    """A request that stood in the way, and for how long."""

    request_id: str
    tenant: str
    us: int


@dataclass(slots=True)
class LifePart:
    """A stretch of a request's time. name: "queue", "prefill", "interference", "preempted", "swapped" or "decode".

    cause: for "queue" a `WaitReason`, "fairness", "running_step" (it came while a step ran) or "grammar"; for
    "interference" whose rows made the steps longer ("prompts" or "answers"); for "preempted" and "swapped" why it was
    thrown out; for "prefill" "recompute" where the tokens had been computed before. What blockers and `others_us` sum
    to is at most `us`.
    """

    name: str
    cause: str
    us: int
    blockers: list[Blocker] = field(default_factory=list)
    others_us: int = 0


@dataclass(slots=True)
class ChunkSpan:
    """Known tokens [start, end) and the step that computed them, of which `own_us` is this chunk's share."""

    start: int
    end: int
    step_us: int
    own_us: int
    step_id: int = -1


@dataclass(slots=True)
class LostPlace:
    """A preemption, `at_us` after the request came; fields as in `records.PreemptionRecord`."""

    at_us: int
    mode: str
    reason: str
    beneficiary: str
    beneficiary_tenant: str
    num_blocks: int
    num_discarded_tokens: int


@dataclass(slots=True)
class LifeReport:
    """Invariant: the parts sum to `total_us`, and none is negative.

    `chunks` and `preemptions` are bounded; `num_chunks` and `num_preemptions` count all. `num_cached_tokens` is what
    the prefix cache gave when it was first let in.
    """

    total_us: int
    parts: list[LifePart]
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    chunks: list[ChunkSpan] = field(default_factory=list)
    num_chunks: int = 0
    preemptions: list[LostPlace] = field(default_factory=list)
    num_preemptions: int = 0
    is_over: bool = False

    def until(self, us: int) -> "LifeReport":
        """The first `us` of it, for whoever had what it wanted before the engine was told."""
        surplus = self.total_us - us
        parts = list(self.parts)
        while surplus > 0 and parts:
            last = parts.pop()
            if last.us > surplus:
                parts.append(_shortened(last, last.us - surplus))
            surplus -= min(surplus, last.us)
        total_us = min(self.total_us, max(us, 0))
        return LifeReport(
            total_us,
            parts,
            self.num_prompt_tokens,
            self.num_cached_tokens,
            self.chunks,
            self.num_chunks,
            self.preemptions,
            self.num_preemptions,
            self.is_over,
        )


def _shortened(part: LifePart, us: int) -> LifePart:
    blockers = [Blocker(b.request_id, b.tenant, b.us * us // part.us) for b in part.blockers]
    return LifePart(part.name, part.cause, us, blockers, part.others_us * us // part.us)
