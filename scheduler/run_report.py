"""What a run came to: latencies, throughput, preemptions, cache hits and waiting, whatever clock it ran on."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kv_cache import BlockManager
from scheduler.arrivals import Arrival
from scheduler.listening import RunListener
from scheduler.outputs import SchedulerOutputs, SequenceEnd
from scheduler.records import StepRecord

PERCENTILES = (50, 90, 99)


@dataclass(slots=True)
class _Open:
    arrival: Arrival
    num_left: int
    first_s: float | None = None


class RunReport(RunListener):
    """Hears of a run and sums it up. Beam searches have no tokens until they end: they count with their ends alone.

    `blocked_request_s`: the seconds that requests spent waiting or swapped out, by the reason of their queue's head.
    """

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._open: dict[str, _Open] = {}
        self._last_token_s: dict[tuple[str, int], float] = {}
        self._newest: StepRecord | None = None
        self._began_s: float | None = None
        self._now = 0.0
        self.ttft_s = array("d")
        self.inter_token_s = array("d")
        self.end_to_end_s = array("d")
        self.blocked_request_s: dict[str, float] = {}
        self.preemptions: dict[str, int] = {"recompute": 0, "swap": 0}
        self._num_preemptions_of: dict[str, int] = {}
        self._max_num_preemptions = 0
        self._counts = dict.fromkeys(
            ("requests", "refused", "finished", "cancelled", "failed", "steps", "prompt_tokens", "output_tokens"), 0
        )
        self._num_moved = {"out": 0, "in": 0, "copied": 0}
        self._num_discarded_tokens = 0
        self.max_num_device_blocks_used = 0

    # -- what it hears -------------------------------------------------------------------------------------------

    def arrived(self, arrival: Arrival) -> None:
        if self._began_s is None:
            self._began_s = arrival.arrival_s
        self._counts["requests"] += 1
        self._counts["prompt_tokens"] += arrival.num_prompt_tokens
        self._open[arrival.request_id] = _Open(arrival, arrival.num_open_samples)

    def refused(self, arrival: Arrival) -> None:
        self._counts["requests"] += 1
        self._counts["refused"] += 1

    def planned(self, outputs: SchedulerOutputs, record: StepRecord) -> None:
        self._now = record.time_s
        if self._newest is not None:
            self._blame(self._newest, record.time_s - self._newest.time_s)
        self._newest = record
        self.max_num_device_blocks_used = max(self.max_num_device_blocks_used, record.num_device_blocks_used)
        self._num_moved["out"] += record.num_blocks_swapped_out
        self._num_moved["in"] += record.num_blocks_swapped_in
        self._num_moved["copied"] += record.num_blocks_copied
        for preemption in record.preemptions:
            self.preemptions[preemption.mode] += 1
            self._num_discarded_tokens += preemption.num_discarded_tokens
            count = self._num_preemptions_of.get(preemption.victim, 0) + 1
            self._num_preemptions_of[preemption.victim] = count
            self._max_num_preemptions = max(self._max_num_preemptions, count)

    def _blame(self, record: StepRecord, seconds: float) -> None:
        for reason, count in (
            (record.waiting_reason, record.num_waiting),
            (record.swapped_reason, record.num_swapped),
        ):
            if reason is not None:
                blocked = self.blocked_request_s
                blocked[reason.value] = blocked.get(reason.value, 0.0) + seconds * count

    def settled(self, outputs: SchedulerOutputs, now: float, tokens: list[tuple[str, int]]) -> None:
        self._now = now
        self._counts["steps"] += 1
        self._counts["output_tokens"] += len(tokens)
        last = self._last_token_s
        for token in tokens:
            before = last.get(token)
            last[token] = now
            if before is not None:
                self.inter_token_s.append(now - before)
                continue
            request = self._open[token[0]]
            if request.first_s is None:
                request.first_s = now
                self.ttft_s.append(now - request.arrival.arrival_s)

    def ended(self, ends: list[SequenceEnd], now: float) -> None:
        self._now = max(self._now, now)
        for end in ends:
            self._last_token_s.pop((end.request_id, end.index), None)
            request = self._open[end.request_id]
            request.num_left -= 1
            if request.num_left:
                continue
            del self._open[end.request_id]
            self._num_preemptions_of.pop(end.request_id, None)
            if end.finish_reason in ("stop", "length"):
                self._counts["finished"] += 1
                self.end_to_end_s.append(now - request.arrival.arrival_s)
            else:
                self._counts["cancelled" if end.finish_reason == "abort" else "failed"] += 1

    # -- what it says --------------------------------------------------------------------------------------------

    @property
    def run_s(self) -> float:
        """From the first arrival to the last thing that happened."""
        return self._now - self._began_s if self._began_s is not None else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers under fixed names; docs/simulation.md says what each one is."""
        seconds = max(self.run_s, 1e-9)
        prefix = self._blocks.prefix_counts
        return {
            **{f"num_{name}": count for name, count in self._counts.items()},
            "run_s": self.run_s,
            "requests_per_s": self._counts["finished"] / seconds,
            "output_tokens_per_s": self._counts["output_tokens"] / seconds,
            "ttft_s": percentiles(self.ttft_s),
            "inter_token_s": percentiles(self.inter_token_s),
            "end_to_end_s": percentiles(self.end_to_end_s),
            "preemptions": dict(self.preemptions),
            "max_num_preemptions_of_a_request": self._max_num_preemptions,
            "num_discarded_tokens": self._num_discarded_tokens,
            "num_blocks_swapped_out": self._num_moved["out"],
            "num_blocks_swapped_in": self._num_moved["in"],
            "num_blocks_copied": self._num_moved["copied"],
            "max_num_device_blocks_used": self.max_num_device_blocks_used,
            "cache": {
                "num_queried_blocks": prefix.num_queried_blocks,
                "num_hit_blocks": prefix.num_hit_blocks,
                "hit_share": prefix.num_hit_blocks / max(prefix.num_queried_blocks, 1),
            },
            "blocked_request_s": dict(sorted(self.blocked_request_s.items())),
        }


def percentiles(values: Iterable[float]) -> dict[str, float | None]:
    """p50, p90 and p99, each a value that occurred (nearest rank); None where there is nothing."""
    ordered = sorted(values)
    return {
        f"p{percent}": ordered[max(-(-percent * len(ordered) // 100), 1) - 1] if ordered else None
        for percent in PERCENTILES
    }
