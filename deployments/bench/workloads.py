"""What is to be sent, and when, for any rate: drawn from a mix or read from a trace. Knows no prompt and no server."""

from dataclasses import dataclass
from random import Random
from typing import Protocol

from deployments.bench.arrivals import at_rate, mean_rate, synthetic_arrivals_s
from deployments.bench.mixes import MixPart, draw_parts
from deployments.bench.requests import PlannedRequest
from deployments.bench.traces import MOONCAKE_BLOCK_TOKENS, TraceRecord


class Workload(Protocol):
    def plan(self, num_requests: int | None, rate: float | None) -> list[PlannedRequest]:
        """The same requests in the same order for every rate; None means the workload's own number or rate."""

    @property
    def own_rate(self) -> float | None:
        """Requests a second as recorded; None where only the caller can say."""

    def describe(self) -> str: ...


@dataclass(frozen=True, slots=True)
class SyntheticWorkload:
    """A mix at gamma-distributed arrivals (`burstiness` as in `synthetic_arrivals_s`)."""

    parts: list[MixPart]
    seed: int
    default_num_requests: int
    burstiness: float = 1.0

    @property
    def own_rate(self) -> float | None:
        return None

    def plan(self, num_requests: int | None, rate: float | None) -> list[PlannedRequest]:
        if rate is None:
            raise ValueError("a synthetic workload has no rate of its own")
        count = self.default_num_requests if num_requests is None else num_requests
        draw = Random(f"lengths {self.seed}")
        parts = draw_parts(self.parts, count, draw)
        arrivals = synthetic_arrivals_s(count, rate, self.burstiness, self.seed)
        return [
            PlannedRequest(
                number, arrival, part.num_input_tokens.draw(draw), part.num_output_tokens.draw(draw), part.name
            )
            for number, (arrival, part) in enumerate(zip(arrivals, parts, strict=True))
        ]

    def describe(self) -> str:
        return ", ".join(
            f"{part.name} {part.share:g} x {part.num_input_tokens} in / {part.num_output_tokens} out".lstrip()
            for part in self.parts
        )


@dataclass(frozen=True, slots=True)
class TraceWorkload:
    """A trace, with lengths and times changed: inputs scaled, outputs fixed, arrivals stretched."""

    name: str
    records: list[TraceRecord]
    scale_input: float = 1.0
    fix_output: int | None = None
    stretch: float = 1.0

    @property
    def own_rate(self) -> float | None:
        return mean_rate([record.arrival_s for record in self.records]) / self.stretch

    def plan(self, num_requests: int | None, rate: float | None) -> list[PlannedRequest]:
        """A rate replaces the stretch. The trace is never repeated: asked for more, it gives what it has."""
        records = self.records[:num_requests]
        arrivals = [record.arrival_s * self.stretch for record in records]
        if rate is not None:
            arrivals = at_rate(arrivals, rate)
        return [self._plan(number, arrival, records[number]) for number, arrival in enumerate(arrivals)]

    def _plan(self, number: int, arrival_s: float, record: TraceRecord) -> PlannedRequest:
        num_input_tokens = max(1, round(record.num_input_tokens * self.scale_input))
        num_output_tokens = record.num_output_tokens if self.fix_output is None else self.fix_output
        keys = record.prefix_keys
        return PlannedRequest(number, arrival_s, num_input_tokens, num_output_tokens, prefix_keys=keys)

    @property
    def prefix_block_tokens(self) -> int:
        """Tokens for each prefix key, scaled as the prompts are."""
        return max(1, round(MOONCAKE_BLOCK_TOKENS * self.scale_input))

    def describe(self) -> str:
        output = "" if self.fix_output is None else f", outputs fixed at {self.fix_output}"
        return f"trace {self.name}, inputs x {self.scale_input:g}{output}"
