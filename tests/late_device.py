"""A device that runs what it is given late, at random moments, in the order of each of its two streams, in the place
of the runner, the sampler and the pool of an engine that plans ahead.

What the host changes between a launch and its run, the work sees changed: as on a GPU, but in every order that a GPU
could take.
"""

from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

import torch

from scheduler import SchedulerOutputs
from worker.engine import Engine
from worker.pending_tokens import DeviceTokens
from worker.sampled_rows import SampledToken, SampleRow
from worker.step_sampling import StepSampler

PASSES = "passes"
MOVES = "moves"
#: how likely something runs each time the host comes by: never before it is waited for, seldom, often
EAGERNESS = (0.0, 0.1, 0.5)


class Work:
    """`value` is there once it has run. Sliced by who chooses beams on the host, which waits for it."""

    def __init__(self, device: "LateDevice", run: Callable[[], Any], after: list["Work"]) -> None:
        self._device = device
        self._run = run
        self.after = after
        self.is_done = False
        self.value: Any = None

    def run(self) -> None:
        self.value = self._run()
        self.is_done = True

    def __getitem__(self, place: Any) -> torch.Tensor:
        self._device.run_until(self)
        return self.value[place]


class LateDevice:
    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._eagerness = rng.choice(EAGERNESS)
        self._streams: dict[str, deque[Work]] = {PASSES: deque(), MOVES: deque()}
        self._last: dict[str, Work | None] = {PASSES: None, MOVES: None}
        self.num_passes = self.num_copies = self.num_moves = 0
        #: the most passes that were launched and had not run
        self.max_behind = 0

    def only_when_waited_for(self) -> None:
        self._eagerness = 0.0

    def launch(self, stream: str, run: Callable[[], Any], after: list[Work] | None = None) -> Work:
        self.come_by()
        work = Work(self, run, after or [])
        self._streams[stream].append(work)
        self._last[stream] = work
        return work

    def record(self) -> "Point":
        return Point(self, self.launch(PASSES, lambda: None))

    def last(self, stream: str) -> list[Work]:
        """What later work of another stream has to wait for."""
        work = self._last[stream]
        return [] if work is None else [work]

    def come_by(self) -> None:
        while self._rng.random() < self._eagerness and self._run_one():
            pass

    def run_until(self, work: Work) -> None:
        while not work.is_done:
            assert self._run_one(), "work waits for what was never launched"

    def run_all(self) -> None:
        while self._run_one():
            pass

    def _run_one(self) -> bool:
        ready = [queue for queue in self._streams.values() if queue and all(work.is_done for work in queue[0].after)]
        if not ready:
            return False
        self._rng.choice(ready).popleft().run()
        return True


class Point:
    """In the place of an `Event`."""

    def __init__(self, device: LateDevice, work: Work) -> None:
        self._device = device
        self._work = work

    def wait(self) -> None:
        self._device.run_until(self._work)


class LateRunner:
    """Tensors are prepared at once, passes run late. `runner`: a `ModelRunner`, or what is like one."""

    def __init__(self, device: LateDevice, runner: Any) -> None:
        self._device = device
        self._runner = runner
        self._passes: list[Work] = []

    def prepare(self, outputs: SchedulerOutputs) -> Any:
        return self._runner.prepare(outputs)

    def run(self, prepared: Any, before: DeviceTokens | None = None) -> Work:
        def run() -> torch.Tensor:
            if before is None:
                return self._runner.run(prepared)
            return self._runner.run(prepared, DeviceTokens(before.token_ids.value, before.place_of))

        device = self._device
        device.num_passes += 1
        work = device.launch(PASSES, run)
        self._passes = [*(p for p in self._passes if not p.is_done), work]
        device.max_behind = max(device.max_behind, sum(not p.is_done for p in self._passes))
        return work

    def logits_of(self, places: list[int]) -> torch.Tensor:
        self._device.run_all()
        return self._runner.logits_of(places)


class LateSamples:
    """In the place of `SampledRows`; `token_ids` is work whose value is them."""

    def __init__(self, device: LateDevice, work: Work) -> None:
        self._device = device
        self._work = work
        self.token_ids = device.launch(PASSES, lambda: work.value.token_ids)

    def wait(self) -> list[SampledToken]:
        self._device.num_copies += 1
        self._device.run_until(self._work)
        return self._work.value.wait()


class LateSampler:
    def __init__(self, device: LateDevice, sampler: Any) -> None:
        self._device = device
        self._sampler = sampler

    def launch(self, logits: Work, rows: list[SampleRow]) -> LateSamples:
        work = self._device.launch(PASSES, lambda: self._sampler.launch(logits.value, rows))
        return LateSamples(self._device, work)


class LatePool:
    """Moves blocks on its own stream, after the passes before and before those that come. `waits` and `is_waited_for`
    are the two halves of that order."""

    def __init__(self, device: LateDevice, pool: Any, *, waits: bool = True, is_waited_for: bool = True) -> None:
        self._device = device
        self._pool = pool
        self._waits = waits
        self._is_waited_for = is_waited_for
        self.num_block_bytes = pool.num_block_bytes

    def swap(self, out: list[tuple[int, int]], into: list[tuple[int, int]], copy: list[tuple[int, int]]) -> None:
        device = self._device
        device.num_moves += 1
        after = device.last(PASSES) if self._waits else []
        moved = device.launch(MOVES, lambda: self._pool.swap(out, into, copy), after)
        if self._is_waited_for:
            device.launch(PASSES, lambda: None, [moved])


def make_late(engine: Engine, rng: Random, **order: bool) -> LateDevice:
    """From now on the engine's device is late; `order` is the pool's."""
    device = LateDevice(rng)
    engine._device = device
    engine._runner = LateRunner(device, engine._runner)
    engine._tensor_pool = LatePool(device, engine._tensor_pool, **order)
    sampler = LateSampler(device, engine._step_sampler._sampler)
    engine._step_sampler = StepSampler(sampler, engine.vocab_size, engine.block_size)
    return device
