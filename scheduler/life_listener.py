"""`LifeListener`: what the requests of a replayed or simulated run spent their time on."""

from collections import deque

from scheduler.arrivals import Arrival
from scheduler.config import QueuePolicy
from scheduler.life_report import LifeReport
from scheduler.listening import RunListener
from scheduler.lives import Lives
from scheduler.outputs import SchedulerOutputs, SequenceEnd
from scheduler.records import StepRecord


class LifeListener(RunListener):
    """`reports` has every request that has ended, `end_s` when it did."""

    def __init__(self, queue_policy: QueuePolicy) -> None:
        self._has_priorities = queue_policy is QueuePolicy.PRIORITY
        self.lives = Lives(is_fair=queue_policy is QueuePolicy.FAIR)
        self.reports: dict[str, LifeReport] = {}
        self.end_s: dict[str, float] = {}
        self._num_open: dict[str, int] = {}
        self._planned: deque[StepRecord] = deque()

    def arrived(self, arrival: Arrival) -> None:
        self._num_open[arrival.request_id] = arrival.num_open_samples
        self.lives.arrived(
            arrival.request_id,
            arrival.arrival_s,
            arrival.num_prompt_tokens,
            tenant=arrival.tenant,
            priority=arrival.priority if self._has_priorities else 0,
            num_rows=arrival.num_open_samples,
        )

    def planned(self, outputs: SchedulerOutputs, record: StepRecord) -> None:
        self._planned.append(record)
        self._settle_empty()

    def settled(self, outputs: SchedulerOutputs, now: float, tokens: list[tuple[str, int]]) -> None:
        self.lives.settled(self._planned.popleft(), now)
        self._settle_empty()

    def _settle_empty(self) -> None:
        """Empty plans have no time of their own: what passes while others run is the time of these."""
        while self._planned and self._planned[0].duration_s is not None:
            record = self._planned.popleft()
            self.lives.settled(record, record.time_s)

    def ended(self, ends: list[SequenceEnd], now: float) -> None:
        for end in ends:
            self._num_open[end.request_id] -= 1
            if self._num_open[end.request_id] == 0:
                report = self.lives.ended(end.request_id, now)
                assert report is not None
                self.reports[end.request_id] = report
                self.end_s[end.request_id] = now
