"""Two lanes of a device on which nothing runs before it must: what is given waits in a queue, and `drain` runs it in a
random order that the marks allow. What somebody forgot to wait for then comes too late, and shows as a wrong byte.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

Work = Callable[[], None]


@dataclass(slots=True, eq=False)
class FakeMark:
    has_passed: bool = False


@dataclass(slots=True, eq=False)
class FakeLane:
    """In the place of a stream. `is_heedless`: it waits for no mark, as if nobody had asked it to."""

    is_heedless: bool = False
    _queue: deque[Work | FakeMark | tuple[FakeMark]] = field(default_factory=deque)

    def run(self, work: Work) -> None:
        self._queue.append(work)

    def mark(self) -> FakeMark:
        mark = FakeMark()
        self._queue.append(mark)
        return mark

    def wait(self, mark: FakeMark) -> None:
        if not self.is_heedless:
            self._queue.append((mark,))

    @property
    def can_go_on(self) -> bool:
        if not self._queue:
            return False
        head = self._queue[0]
        return not isinstance(head, tuple) or head[0].has_passed

    def go_on(self) -> None:
        """Run what is first in the queue."""
        head = self._queue.popleft()
        if isinstance(head, FakeMark):
            head.has_passed = True
        elif not isinstance(head, tuple):
            head()


class FakeDevice:
    """`heedless` names lanes that wait for nothing: "compute", "transfer"."""

    def __init__(self, rng: random.Random, heedless: tuple[str, ...] = ()) -> None:
        self._rng = rng
        self.compute = FakeLane("compute" in heedless)
        self.transfer = FakeLane("transfer" in heedless)

    @property
    def lanes(self) -> tuple[FakeLane, FakeLane]:
        return self.compute, self.transfer

    def advance(self, max_pieces: int = 12) -> None:
        """Run some pieces of work. It changes lanes seldom, so that one falls far behind the other."""
        lane = self._rng.choice(self.lanes)
        for _ in range(self._rng.randint(0, max_pieces)):
            if self._rng.random() < 0.1 or not lane.can_go_on:
                ready = [lane for lane in self.lanes if lane.can_go_on]
                if not ready:
                    return
                lane = self._rng.choice(ready)
            lane.go_on()

    def drain(self) -> None:
        """Run everything. Each lane's queue must come to its end."""
        while any(lane.can_go_on for lane in self.lanes):
            self.advance()
        assert not any(lane._queue for lane in self.lanes), "a lane waits for what never comes"
