"""Queues and blocks over time, for drawing: a bounded number of points, however long the run."""

from scheduler.listening import RunListener
from scheduler.outputs import SchedulerOutputs
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

    def planned(self, outputs: SchedulerOutputs, record: StepRecord) -> None:
        if self._num_steps % self._stride == 0:
            self.points.append(
                (
                    record.time_s,
                    record.num_running,
                    record.num_waiting,
                    record.num_swapped,
                    record.num_device_blocks_used,
                )
            )
            if len(self.points) > MAX_POINTS:
                del self.points[1::2]
                self._stride *= 2
        self._num_steps += 1
