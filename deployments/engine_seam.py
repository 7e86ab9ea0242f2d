"""The seam between a worker replica and its engine: what a replica needs of `worker.engine_loop.EngineLoop`.

`build_engine` makes the real one. A builder is named by its import path, so that the replica's process alone
loads torch, and a test can put a small engine in its place.
"""

import importlib
import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Protocol

from deployments.model_facts import ModelFacts
from scheduler.life_report import LifeReport
from scheduler.limits import StepLimits
from scheduler.records import StepRecord
from worker.config import EngineConfig
from worker.types import EngineLoad, EngineRequest, TokenEvent

#: called in the engine's thread, once a step, with all events of the step
Deliver = Callable[[list[TokenEvent]], None]
#: called in the engine's thread when its loop ends by an error
OnDeath = Callable[[BaseException], None]


class LoopStatus(Protocol):
    """`step_age_s` is how long the step now running has run; 0.0 between steps."""

    @property
    def alive(self) -> bool: ...
    @property
    def step_id(self) -> int: ...
    @property
    def step_age_s(self) -> float: ...
    @property
    def load(self) -> EngineLoad: ...
    @property
    def error(self) -> str | None: ...


class Loop(Protocol):
    """Thread-safe; every call but `stop` returns at once. Unknown request ids are no error."""

    def start(self) -> None: ...
    def stop(self, timeout_s: float) -> None: ...
    def submit(self, request: EngineRequest) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def finish(self, request_id: str, index: int, num_tokens: int) -> None: ...
    def life(self, request_id: str) -> "Future[LifeReport | None]": ...
    def status(self) -> LoopStatus: ...
    def records_since(self, step_id: int) -> list[StepRecord]: ...
    @property
    def limits(self) -> StepLimits: ...
    def set_limits(self, limits: StepLimits) -> None: ...


EngineBuilder = Callable[[EngineConfig, Deliver, OnDeath], tuple[ModelFacts, Loop]]


def threads_per_worker(num_workers: int = 1) -> int:
    """Processors for the model of each of a machine's workers: one is left to the event loops that carry the answers,
    unless that would be half of the machine, which costs more than sharing it does (measured: docs/performance.md).
    """
    num_cores = len(os.sched_getaffinity(0))
    return max(1, (num_cores if num_cores <= 2 else num_cores - 1) // num_workers)


def build_engine(config: EngineConfig, deliver: Deliver, on_death: OnDeath) -> tuple[ModelFacts, Loop]:
    """Loads the model, runs it once, and makes the loop around it. Takes seconds to minutes.

    Ray limits torch to the processors that it assigned, which here are none: the number is always set.
    """
    from worker.engine import Engine
    from worker.engine_loop import EngineLoop

    if config.num_threads is None:
        config = replace(config, num_threads=threads_per_worker())
    engine = Engine(config)
    facts = ModelFacts(
        max_model_len=engine.max_model_len,
        vocab_size=engine.vocab_size,
        eos_token_ids=tuple(engine.eos_token_ids),
        block_size=engine.block_size,
        num_device_blocks=engine.num_device_blocks,
        num_host_blocks=engine.num_host_blocks,
        num_block_bytes=engine.num_block_bytes,
        swap_out_bytes_per_s=engine.swap_rates.out_blocks_per_s * engine.num_block_bytes,
        swap_in_bytes_per_s=engine.swap_rates.in_blocks_per_s * engine.num_block_bytes,
        generation_defaults=dict(engine.generation_defaults),
        attention_backend=engine.attention_backend,
    )
    return facts, EngineLoop(engine, deliver, on_death)


def import_builder(path: str) -> EngineBuilder:
    """The builder named `package.module:function`."""
    module_name, _, name = path.partition(":")
    builder: EngineBuilder = getattr(importlib.import_module(module_name), name)
    return builder
