"""`Journey`: when what happened to one request, as the ingress saw it over all its attempts.

Owns moments and the workers' reports as they came. What they mean is `stitching.py`'s.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from deployments.frames import Accepted, Frame, Tokens
from deployments.keys import ANYBODY, Caller
from scheduler.life_report import LifeReport

#: frames that were there already, when they were asked for, had waited for their reader
_BACKLOG_US = 200


@dataclass(slots=True)
class Attempt:
    """One worker's turn; moments are microseconds since the request came. `has_told`: `life` is the worker's last word,
    and came with the last tokens.

    `tokens_us`: the last frame with tokens. `lost`: why it came to nothing more; `end_us` is when that was known.
    """

    request_id: str
    sent_us: int
    accepted_us: int | None = None
    worker: int | None = None
    replica_id: str = ""
    life: LifeReport | None = None
    has_told: bool = False
    tokens_us: int | None = None
    was_backlogged: bool = False
    end_us: int | None = None
    lost: str | None = None


@dataclass(slots=True, eq=False)
class Journey:
    """`aliases` are further ids under which it is asked for. `read_us`: all of the request was there. `end_us` None: it
    goes on."""

    request_id: str
    arrival_s: float
    num_prompt_tokens: int
    caller: Caller = ANYBODY
    aliases: tuple[str, ...] = ()
    clock: Callable[[], float] = time.monotonic
    read_us: int = 0
    began_us: int = 0
    first_token_us: int | None = None
    end_us: int | None = None
    status: str = "running"
    attempts: list[Attempt] = field(default_factory=list)
    _asked_us: int = 0

    def now_us(self) -> int:
        return max(round((self.clock() - self.arrival_s) * 1e6), 0)

    def begin(self) -> None:
        """Its tokens are known, and it is on its way to a worker."""
        self.began_us = self.now_us()
        read_us = round((self.caller.read_s - self.arrival_s) * 1e6)
        self.read_us = min(max(read_us, 0), self.began_us)

    def sent(self, attempt_id: str) -> None:
        self.attempts.append(Attempt(attempt_id, self.now_us()))

    def asked(self) -> None:
        """The reader wants the next frames."""
        self._asked_us = self.now_us()

    def received(self, frames: list[Frame]) -> None:
        attempt = self.attempts[-1]
        now_us = self.now_us()
        for frame in frames:
            if isinstance(frame, Accepted):
                attempt.accepted_us, attempt.worker, attempt.replica_id = now_us, frame.worker, frame.replica_id
            elif isinstance(frame, Tokens):
                attempt.tokens_us = now_us
                attempt.was_backlogged = now_us - self._asked_us < _BACKLOG_US
                if self.first_token_us is None and any(event.token_ids for event in frame.events):
                    self.first_token_us = now_us
                for event in frame.events:
                    if event.life is not None:
                        attempt.life, attempt.has_told = event.life, event.life.is_over

    def lost(self, reason: str) -> None:
        """The attempt came to nothing more."""
        attempt = self.attempts[-1]
        attempt.lost, attempt.end_us = reason, self.now_us()

    def end(self, status: str) -> None:
        """The first call counts."""
        if self.end_us is None:
            self.end_us, self.status = self.now_us(), status

    @property
    def lacks_life(self) -> bool:
        """Whether the last attempt's worker has yet to say what became of it."""
        attempt = self.attempts[-1] if self.attempts else None
        if attempt is None or attempt.lost is not None or attempt.accepted_us is None:
            return False
        return not attempt.has_told
