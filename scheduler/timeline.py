"""Queues and blocks over time, for drawing: a bounded number of points, however long the run."""

from scheduler.arrivals import Arrival
from scheduler.listening import RunListener
from scheduler.outputs import SchedulerOutputs, SequenceEnd
from scheduler.records import StepRecord

MAX_POINTS = 4000

#: (time, running groups, waiting groups, swapped groups, device blocks held)
Point = tuple[float, int, int, int, int]


class Timeline(RunListener):
    """Keeps every `stride`-th step; when there are too many points, every other one goes and the stride doubles."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self._stride = 1
        self._num_steps = 0
        self._num_open = 0

    def arrived(self, arrival: Arrival) -> None:
        self._num_open += arrival.num_open_samples

    def planned(self, outputs: SchedulerOutputs, record: StepRecord) -> None:
        if self._num_steps % self._stride == 0:
            queues = (record.num_running, record.num_waiting, record.num_swapped)
            self._append((record.time_s, *queues, record.num_device_blocks_used))
        self._num_steps += 1

    def ended(self, ends: list[SequenceEnd], now: float) -> None:
        self._num_open -= len(ends)
        if self._num_open == 0:
            self._append((now, 0, 0, 0, 0))  # no step will tell of it

    def _append(self, point: Point) -> None:
        self.points.append(point)
        if len(self.points) > MAX_POINTS:
            del self.points[1::2]
            self._stride *= 2
