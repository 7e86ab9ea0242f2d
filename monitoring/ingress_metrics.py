"""What an ingress replica counts: requests, their tokens and latencies. Knows nothing of steps or blocks."""

from collections.abc import Collection, Iterable

from monitoring.accumulator import Accumulator, Snapshot
from monitoring.metric import PHASES
from monitoring.table import OTHER_TENANT

_ANSWERED = ("stop", "length")


class IngressMetrics:
    """Request series of one ingress replica. Called from its event loop alone. A tenant that is not among `tenants`
    is counted as `other`."""

    def __init__(self, model: str, tenants: Collection[str] = ()) -> None:
        self._tenants = frozenset(tenants)
        self._accumulator = Accumulator({"model": model}, tenants)

    def first_token(self, ttft_s: float) -> None:
        """Once for each request that produced a token."""
        self._accumulator.observe("stallfree_time_to_first_token_seconds", ttft_s)

    def inter_token(self, gap_s: float) -> None:
        self._accumulator.observe("stallfree_inter_token_latency_seconds", gap_s)

    def tokens_delivered(self, n: int, tenant: str = "") -> None:
        self._accumulator.inc("stallfree_generation_tokens_total", n)
        self._accumulator.inc("stallfree_tenant_generation_tokens_total", n, self._label_of(tenant))

    def failover(self, reason: str) -> None:
        """A worker was lost to a request that was to go on elsewhere: "died", "stalled" or "drained"."""
        self._accumulator.inc("stallfree_failovers_total", 1, reason)

    def routed(self, reason: str) -> None:
        """A worker took a request; `reason` is why it was chosen: "prefix", "load" or "only"."""
        self._accumulator.inc("stallfree_router_choices_total", 1, reason)

    def build(self, *, version: str, python: str, ray: str) -> None:
        self._accumulator.tell("stallfree_build_info", {"version": version, "python": python, "ray": ray})

    def request_sizes(self, prompt_tokens: int, generation_tokens: int, time_per_token_s: float | None) -> None:
        """Once for each request, however it ended. None: it ended otherwise than by stop or length, or has no token
        after the first."""
        self._accumulator.observe("stallfree_request_prompt_tokens", prompt_tokens)
        self._accumulator.observe("stallfree_request_generation_tokens", generation_tokens)
        if time_per_token_s is not None:
            self._accumulator.observe("stallfree_request_time_per_output_token_seconds", time_per_token_s)

    def request_phases(self, parts: Iterable[tuple[str, float]]) -> None:
        """Once for each request that a worker took: parts of its time, by name and in seconds."""
        totals = dict.fromkeys(PHASES, 0.0)
        for name, seconds in parts:
            phase = "preempted" if name == "swapped" else name
            if phase in totals:
                totals[phase] += seconds
        for phase, seconds in totals.items():
            self._accumulator.observe(f"stallfree_request_{phase}_seconds", seconds)

    def request_finished(self, finish_reason: str, prompt_tokens: int, e2e_s: float, tenant: str = "") -> None:
        """Once for each request, however it ended. Only whole answers enter the latency histogram: a client
        that left or a failure after a millisecond says nothing about how long an answer takes."""
        self._accumulator.inc("stallfree_requests_total", 1, finish_reason)
        self._accumulator.inc("stallfree_prompt_tokens_total", prompt_tokens)
        self._accumulator.inc("stallfree_tenant_requests_total", 1, self._label_of(tenant))
        self._accumulator.inc("stallfree_tenant_prompt_tokens_total", prompt_tokens, self._label_of(tenant))
        if finish_reason in _ANSWERED:
            self._accumulator.observe("stallfree_e2e_request_latency_seconds", e2e_s)

    def request_rejected(self, reason: str, tenant: str = "") -> None:
        """Turned away before its first token."""
        self._accumulator.inc("stallfree_rejections_total", 1, reason)
        self._accumulator.inc("stallfree_tenant_rejections_total", 1, self._label_of(tenant))

    def _label_of(self, tenant: str) -> str:
        return tenant if tenant in self._tenants else OTHER_TENANT

    def snapshot(self) -> Snapshot:
        return self._accumulator.snapshot()
