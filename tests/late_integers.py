"""The real engine around a model of integers whose device is late: freed blocks turn to poison, and whoever reads
poison, or a token that is not known, fails at once."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kv_cache.block_pool import BlockPool
from scheduler import SchedulerOutputs
from tests.integer_oracle.runner import slot_value
from tests.late_device import PASSES, LateDevice
from tests.paced_model import PacedModel
from worker.config import EngineConfig, resolve_engine_config
from worker.engine import Engine
from worker.loading import LoadedModel, ModelFacts
from worker.pending_tokens import DeviceTokens

VOCAB_SIZE = 48
LETTERS = list(range(4, VOCAB_SIZE))
_EMPTY = -1
_POISON = -2


class IntegerPool:
    """In the place of `TensorPool`: a block is a list of slots."""

    device = torch.device("cpu")
    num_block_bytes = 1

    def __init__(self, block_size: int, num_device_blocks: int, num_host_blocks: int) -> None:
        self.block_size = block_size
        self.num_device_blocks = num_device_blocks
        self.num_host_blocks = num_host_blocks
        self.blocks = [[_EMPTY] * block_size for _ in range(num_device_blocks)]
        self._host = [[_EMPTY] * block_size for _ in range(num_host_blocks)]

    def swap(self, out: list[tuple[int, int]], into: list[tuple[int, int]], copy: list[tuple[int, int]]) -> None:
        for source, destination in out:
            self._host[destination] = list(self.blocks[source])
        for source, destination in into:
            self.blocks[destination] = list(self._host[source])
        for source, destination in copy:
            self.blocks[destination] = list(self.blocks[source])

    def time_swap_s(self, out: list[tuple[int, int]], into: list[tuple[int, int]], clock: object) -> float:
        return 0.0

    def poison(self, block: int) -> None:
        self.blocks[block] = [_POISON] * self.block_size


@dataclass(slots=True)
class _Row:
    seq_id: int
    start: int
    token_ids: list[int]
    table: list[int]
    do_sample: bool


class IntegerRunner:
    """In the place of `ModelRunner`. What a row reads is all that its table holds of it."""

    def __init__(self, model: PacedModel, pool: IntegerPool) -> None:
        self._model = model
        self._pool = pool

    def prepare(self, outputs: SchedulerOutputs) -> list[_Row]:
        return [_Row(c.seq_id, c.start, c.token_ids, list(c.block_table), c.do_sample) for c in outputs.chunks]

    def run(self, rows: list[_Row], before: DeviceTokens | None = None) -> torch.Tensor:
        size, blocks = self._pool.block_size, self._pool.blocks
        for row in rows:
            for position, token_id in enumerate(row.token_ids, row.start):
                if token_id < 0:
                    assert before is not None
                    token_id = int(before.token_ids[before.place_of[row.seq_id]])
                assert token_id >= 0, "a token is computed that nobody knows"
                block = row.table[position // size]
                assert block != 0, "the null block is written"
                blocks[block][position % size] = slot_value(token_id, position)
        reads: list[tuple[int, ...]] = []
        for row in rows:
            if row.do_sample:
                end = row.start + len(row.token_ids)
                slots = tuple([slot for block in row.table for slot in blocks[block]][:end])
                assert _POISON not in slots, "a block is read that was freed"
                assert _EMPTY not in slots, "a slot is read that nobody wrote"
                reads.append(slots)
        return self._model.logits(reads)

    def logits_of(self, places: list[int]) -> torch.Tensor:
        """For log-probabilities of prompts, which this model has none of."""
        raise NotImplementedError


class IntegerEngine(Engine):
    """`config` sets the sizes of the pools; its model is not read."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float]) -> None:
        resolved = resolve_engine_config(
            config, device_type="cpu", model_max_len=4096, block_bytes=1, cache_memory_bytes=0
        )
        pool: Any = IntegerPool(resolved.block_size, resolved.num_device_blocks, resolved.num_host_blocks)
        self.integers = pool
        runner: Any = IntegerRunner(PacedModel(VOCAB_SIZE, LETTERS), pool)
        facts = ModelFacts(Path(), VOCAB_SIZE, (), resolved.max_model_len)
        self._wire(LoadedModel(runner, pool, resolved, facts), clock)


def poison_freed_blocks(engine: IntegerEngine, device: LateDevice) -> None:
    """What `update`, an abort or `finish` frees is poison at once, whatever still runs: no step may read it any more.

    Blocks of preempted requests are free while a step before still reads them, and while they are swapped out: what is
    planned next takes them in the device's order, and so does the poison.
    """
    manager, scheduler = engine.block_manager, engine.scheduler
    is_planning = is_moving = False

    def on_free(block: int) -> None:
        if is_moving:
            return
        if is_planning:
            device.launch(PASSES, lambda: engine.integers.poison(block))
        else:
            device.come_by()
            engine.integers.poison(block)

    plan, move = scheduler.schedule, manager.swap_out

    def schedule(now: float) -> SchedulerOutputs:
        nonlocal is_planning
        is_planning = True
        try:
            return plan(now)
        finally:
            is_planning = False

    def swap_out(num_tokens: dict[int, int]) -> list[tuple[int, int]] | None:
        nonlocal is_moving
        is_moving = True
        try:
            return move(num_tokens)
        finally:
            is_moving = False

    manager._device = _WatchedPool(engine.num_device_blocks, on_free)
    scheduler.schedule = schedule  # type: ignore[method-assign]
    manager.swap_out = swap_out  # type: ignore[method-assign]


class _WatchedPool(BlockPool):
    def __init__(self, num_blocks: int, on_free: Callable[[int], None]) -> None:
        super().__init__(num_blocks, first_id=1)
        self._on_free = on_free

    def release(self, blocks: list[int]) -> None:
        num_empty = len(self._empty)
        super().release(blocks)
        for block in self._empty[num_empty:]:
            self._on_free(block)
