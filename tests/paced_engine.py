"""An engine whose steps last as long as they are told, at the seam of `deployments.engine_seam`: the real scheduler,
blocks, sampler and loop around a model of integers.

Named by import path (`tests.paced_engine:build`). The environment sets the pace: `PACED_STEP_MS` (20), and
`PACED_STEP_MS_OF_WORKER_2` for the worker of rank 2. With `PACED_LOG` naming a folder, each process writes there when
requests came and when their tokens left, on the machine's monotonic clock.
"""

import json
import os
import time
from pathlib import Path

import torch
from ray import serve
from ray.serve.exceptions import RayServeException

from deployments.engine_seam import Deliver, OnDeath
from deployments.model_facts import ModelFacts
from scheduler import SchedulerOutputs
from tests.paced_model import PacedCache, PacedModel
from worker.config import EngineConfig, resolve_engine_config
from worker.engine import Engine
from worker.engine_loop import EngineLoop
from worker.loading import LoadedModel
from worker.loading import ModelFacts as LoadedFacts
from worker.pending_tokens import DeviceTokens
from worker.text import Tokenizer
from worker.types import EngineRequest, TokenEvent
from worker.weights import resolve_model

DEFAULT_STEP_MS = 20.0
STEP_VARIABLE = "PACED_STEP_MS"
LOG_VARIABLE = "PACED_LOG"
MAX_MODEL_LEN = 8192
#: blocks where the options do not say
NUM_BLOCKS = 8192
NUM_HOST_BLOCKS = 512


def letters(tokenizer: Tokenizer) -> list[int]:
    """Ids of one ASCII letter or digit each: answers of them are equal as text only if they are equal as tokens."""
    return [
        token_id
        for token_id in range(tokenizer.vocab_size)
        if token_id not in tokenizer.special_ids
        and len(text := tokenizer.decode([token_id])) == 1
        and text.isascii()
        and text.isalnum()
    ]


def paced_model(folder: Path) -> PacedModel:
    tokenizer = Tokenizer(folder)
    return PacedModel(tokenizer.vocab_size, letters(tokenizer))


class PacedRunner:
    """In the place of `ModelRunner`: each step lasts `step_s`."""

    def __init__(self, model: PacedModel, cache: PacedCache, step_s: float) -> None:
        self._model = model
        self._cache = cache
        self._step_s = step_s

    def prepare(self, outputs: SchedulerOutputs) -> SchedulerOutputs:
        return outputs

    def run(self, outputs: SchedulerOutputs, before: DeviceTokens | None = None) -> torch.Tensor:
        assert before is None, "this model knows no steps in flight"
        began_s = time.monotonic()
        logits = self._model.logits(self._cache.read(outputs))
        time.sleep(max(began_s + self._step_s - time.monotonic(), 0.0))
        return logits

    def logits_of(self, places: list[int]) -> torch.Tensor:
        """For log-probabilities of prompts, which this model has none of."""
        raise NotImplementedError("prompt_logprobs on the paced engine")


class PacedEngine(Engine):
    """`step_s`: how long the model takes for a step, whatever is in it."""

    def __init__(self, config: EngineConfig, step_s: float) -> None:
        folder = resolve_model(config.model, config.revision)
        model = paced_model(folder)
        resolved = resolve_engine_config(
            config, device_type="cpu", model_max_len=MAX_MODEL_LEN, block_bytes=1, cache_memory_bytes=NUM_BLOCKS
        )
        num_host_blocks = min(resolved.num_host_blocks, NUM_HOST_BLOCKS)
        cache = PacedCache(resolved.block_size, resolved.num_device_blocks, num_host_blocks)
        runner = PacedRunner(model, cache, step_s)
        facts = LoadedFacts(folder, model.vocab_size, (), resolved.max_model_len)
        log_folder = os.environ.get(LOG_VARIABLE)
        self._log: list[tuple[str, float, str, int]] = []
        self._log_path = None if log_folder is None else Path(log_folder) / f"{os.getpid()}.jsonl"
        self._wire(LoadedModel(runner, cache, resolved, facts), time.monotonic)

    def add_request(self, request: EngineRequest, now: float) -> None:
        super().add_request(request, now)
        self._log.append(("arrived", now, request.request_id, 0))

    def step(self, now: float) -> list[TokenEvent]:
        events = super().step(now)
        if self._log_path is not None:
            now = time.monotonic()
            self._log += [("tokens", now, event.request_id, len(event.token_ids)) for event in events]
        return events

    def check_integrity(self) -> None:
        """Called when the engine turns idle: nothing waits for the file."""
        super().check_integrity()
        if self._log_path is not None and self._log:
            with self._log_path.open("a") as file:
                file.writelines(json.dumps(entry) + "\n" for entry in self._log)
        self._log.clear()


def build(config: EngineConfig, deliver: Deliver, on_death: OnDeath) -> tuple[ModelFacts, EngineLoop]:
    """An `EngineBuilder`. One thread: what it computes is small, and the pace leaves the processors to others."""
    torch.set_num_threads(1)
    engine = PacedEngine(config, _step_s())
    facts = ModelFacts(
        max_model_len=engine.max_model_len,
        vocab_size=engine.vocab_size,
        eos_token_ids=(),
        block_size=engine.block_size,
        num_device_blocks=engine.num_device_blocks,
        num_host_blocks=engine.num_host_blocks,
        num_block_bytes=engine.num_block_bytes,
    )
    return facts, EngineLoop(engine, deliver, on_death)


def _step_s() -> float:
    own = os.environ.get(f"{STEP_VARIABLE}_OF_WORKER_{_rank()}")
    return float(own or os.environ.get(STEP_VARIABLE, DEFAULT_STEP_MS)) / 1000


def _rank() -> int | None:
    """None where no replica is, as in a benchmark of the loop alone."""
    try:
        rank = serve.get_replica_context().rank
    except RayServeException:
        return None
    return None if rank is None else rank.rank
