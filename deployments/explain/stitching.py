"""From a journey to the parts of its time, in the order in which they passed. They sum exactly; none is negative.

Knows what moments mean, nothing of JSON or of who may read it.
"""

from collections.abc import Iterator

from deployments.explain.journey import Attempt, Journey
from scheduler.life_report import LifePart


def stitched(journey: Journey) -> tuple[list[LifePart], int]:
    """The parts, and what they sum to: microseconds from arrival to the end, or until now."""
    end_us = journey.now_us() if journey.end_us is None else journey.end_us
    pieces = _Pieces()
    pieces.until("transport", "request", min(journey.read_us, end_us))
    pieces.until("tokenize", "", min(journey.began_us, end_us))
    for number, attempt in enumerate(journey.attempts):
        is_last = number == len(journey.attempts) - 1
        if number > 0:
            pieces.until("failover", journey.attempts[number - 1].lost or "", min(attempt.sent_us, end_us))
        if attempt.lost is not None:
            _add_lost(pieces, attempt, is_first=number == 0, end_us=min(attempt.end_us or end_us, end_us))
        elif is_last:
            _add_last(pieces, attempt, is_first=number == 0, end_us=end_us, is_over=journey.end_us is not None)
    lost = journey.attempts[-1].lost if journey.attempts else None
    pieces.until("other" if lost is None else "failover", lost or "", end_us)
    return [part for part in pieces.parts if part.us > 0], end_us


class _Pieces:
    """Parts one after the other; `at_us` is where the last one ends."""

    def __init__(self) -> None:
        self.parts: list[LifePart] = []
        self.at_us = 0

    def until(self, name: str, cause: str, us: int) -> None:
        if us > self.at_us:
            self.parts.append(LifePart(name, cause, us - self.at_us, [], us - self.at_us))
            self.at_us = us

    def add(self, parts: list[LifePart]) -> None:
        self.parts += parts
        self.at_us += sum(part.us for part in parts)


def _add_lost(pieces: _Pieces, attempt: Attempt, *, is_first: bool, end_us: int) -> None:
    """What an attempt that was lost has delivered is not lost; all else is the failover's."""
    if attempt.tokens_us is not None and attempt.accepted_us is not None:
        pieces.until("route" if is_first else "failover", "" if is_first else "route", attempt.accepted_us)
        known_us = max(attempt.tokens_us - pieces.at_us, 0)
        if attempt.life is not None:
            pieces.add(attempt.life.until(known_us).parts)
        pieces.until("decode", "on_a_lost_worker", attempt.tokens_us)
    pieces.until("failover", attempt.lost or "", end_us)


def _add_last(pieces: _Pieces, attempt: Attempt, *, is_first: bool, end_us: int, is_over: bool) -> None:
    accepted_us = end_us if attempt.accepted_us is None else min(attempt.accepted_us, end_us)
    # One that goes on is on a worker up to now; of one that has ended, what came after its last tokens is delivery.
    worker_us = end_us if not is_over or attempt.tokens_us is None else min(attempt.tokens_us, end_us)
    if attempt.accepted_us is None:
        worker_us = end_us
    life = attempt.life
    lived_us = 0 if life is None else life.total_us
    # The worker's time begins a moment before its word that it has the request is here.
    early_us = min(max(lived_us - (worker_us - accepted_us), 0), accepted_us - pieces.at_us)
    if not attempt.has_told:  # then it may have gone on after what its reader had
        early_us = 0
    pieces.until("route" if is_first else "failover", "" if is_first else "route", accepted_us - early_us)
    if life is not None:
        pieces.add(_resumed(life.until(worker_us - pieces.at_us).parts, is_first=is_first))
    if life is None:
        pieces.until("other", "unknown" if attempt.accepted_us is not None else "", worker_us)
    pieces.until("deliver" if attempt.was_backlogged and is_over else "transport", "", worker_us)
    pieces.until("deliver", "", end_us)


def _resumed(parts: list[LifePart], *, is_first: bool) -> list[LifePart]:
    """Tokens that a lost worker had computed are computed again by the next one."""
    return parts if is_first else list(_again(parts))


def _again(parts: list[LifePart]) -> Iterator[LifePart]:
    for part in parts:
        is_first_prefill = part.name == "prefill" and not part.cause
        yield LifePart(part.name, "failover", part.us, part.blockers, part.others_us) if is_first_prefill else part
