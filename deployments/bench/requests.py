"""One request of a benchmark: what is planned before the run, and what is seen of its answer. Knows no server."""

from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """`arrival_s` counts from the start of the run. `kind` names the part of a mix it belongs to.

    `prefix_keys` stand for blocks of the prompt's start: requests with equal keys share these blocks' tokens.
    """

    number: int
    arrival_s: float
    num_input_tokens: int
    num_output_tokens: int
    kind: str = ""
    prefix_keys: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class Answer:
    """What was seen of one request. Times are the client's clock, in seconds.

    Every latency counts from `intended_s`, the moment at which the request should have left: a client or a server
    that is late cannot hide it. `delivery_times_s` has one entry for each delivery of at least one token. `cut_s` is
    when a run of a set length ended while this answer was under way: it neither failed nor is it complete.
    """

    request: PlannedRequest
    intended_s: float
    sent_s: float | None = None
    delivery_times_s: list[float] = field(default_factory=list)
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    ended_s: float | None = None
    error: str | None = None
    cut_s: float | None = None

    @property
    def is_complete(self) -> bool:
        return self.ended_s is not None and self.error is None

    @property
    def ttft_s(self) -> float | None:
        return self.delivery_times_s[0] - self.intended_s if self.delivery_times_s else None

    @property
    def e2e_s(self) -> float | None:
        return None if self.ended_s is None else self.ended_s - self.intended_s

    @property
    def intervals_s(self) -> list[tuple[float, float]]:
        """From one delivery to the next, and of a cut answer to the cut: a stall at the end of a run is one, too."""
        times_s = self.delivery_times_s
        if self.cut_s is not None and times_s:
            times_s = [*times_s, max(self.cut_s, times_s[-1])]
        return list(pairwise(times_s))

    @property
    def gaps_s(self) -> list[float]:
        """The inter-token times."""
        return [after - before for before, after in self.intervals_s]

    @property
    def send_lateness_s(self) -> float | None:
        return None if self.sent_s is None else self.sent_s - self.intended_s
