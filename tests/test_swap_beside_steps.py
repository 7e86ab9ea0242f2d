"""An engine that plans ahead and swaps through staging memory, on a device whose passes and moves run late."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from kv_cache.staged_swap import StagedSwap
from kv_cache.tensor_pool import NUM_STAGING_SLOTS, _Staging
from tests.late_device import MOVES, PASSES, LateDevice, Work, make_late
from tests.oracle.prompts import tiny_prompts
from tests.tiny_models import save_tiny_model
from worker.config import EngineConfig
from worker.engine import Engine
from worker.types import EngineRequest, SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_HOST_BLOCKS = 60
REQUESTS = [
    EngineRequest(str(number), prompt, SamplingParams(max_tokens=24, temperature=1.0, seed=number, ignore_eos=True))
    for number, prompt in enumerate(tiny_prompts([13, 40, 16, 8, 29, 50, 11, 37]))
]


@dataclass(slots=True)
class LateLane:
    """A stream of the late device as the pool sees it."""

    device: LateDevice
    stream: str
    is_heedless: bool

    def run(self, work: Callable[[], None]) -> None:
        self.device.launch(self.stream, work)

    def mark(self) -> Work:
        return self.device.launch(self.stream, lambda: None)

    def wait(self, mark: Work) -> None:
        if not self.is_heedless:
            self.device.launch(self.stream, lambda: None, [mark])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), "llama")


def engine_of(folder: Path, num_device_blocks: int) -> Engine:
    return Engine(
        EngineConfig(
            model=str(folder),
            device="cpu",
            max_model_len=96,
            max_num_batched_tokens=48,
            block_size=8,
            num_device_blocks=num_device_blocks,
            num_host_blocks=NUM_HOST_BLOCKS,
            preemption_mode="swap",
            enable_prefix_caching=False,
            chunk_alignment=1,
            async_scheduling=True,
        )
    )


def staged(engine: Engine, seed: int, *, heedless: str | None = None) -> Engine:
    """The same engine on a late device, its pool with two lanes of it and staging memory of two blocks a slot."""
    pool = engine._tensor_pool
    device = make_late(engine, Random(seed))
    lanes = [LateLane(device, stream, stream == heedless) for stream in (PASSES, MOVES)]
    pool._moves = StagedSwap(*lanes, _Staging(pool._layers, NUM_HOST_BLOCKS, 2), NUM_STAGING_SLOTS, 2)
    engine._tensor_pool = pool
    return engine


def answers(engine: Engine) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {request.request_id: [] for request in REQUESTS}
    for request in REQUESTS:
        engine.add_request(request, 0.0)
    while engine.has_unfinished():
        for event in engine.step(0.0):
            tokens[event.request_id] += event.token_ids
    engine.close()
    return tokens


def test_answers_are_those_of_an_engine_that_never_swaps(folder: Path) -> None:
    want = answers(engine_of(folder, 100))
    for seed in range(3):
        engine = staged(engine_of(folder, 22), seed)
        assert answers(engine) == want
        assert engine.totals.num_blocks_swapped_in > 2 * NUM_STAGING_SLOTS


@pytest.mark.parametrize("stream", [PASSES, MOVES])
def test_a_stream_that_waits_for_nothing_changes_answers(folder: Path, stream: str) -> None:
    want = answers(engine_of(folder, 100))
    assert any(answers(staged(engine_of(folder, 22), seed, heedless=stream)) != want for seed in range(4))
