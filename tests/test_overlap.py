"""Steps that are planned while the one before runs: the same tokens in every order of events on a late device, no
block read after it was freed, and at most one copy to the host for each step."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import pytest

from scheduler.settle import Settlement
from tests.late_device import LateDevice
from tests.late_integers import LETTERS
from tests.late_runs import Arrival, check_same, engine_of, late_engine, play, random_scenario
from worker.config import EngineConfig
from worker.device import CpuDevice
from worker.pending_tokens import DeviceTokens
from worker.step_sampling import LaunchedSamples
from worker.types import EngineRequest, SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_SCENARIOS = 30
NUM_SLOW_SCENARIOS = 150
#: a planted fault shows in one of so many scenarios
NUM_TO_FAIL = 40


@dataclass(slots=True)
class Totals:
    num_swaps: int = 0
    num_recomputes: int = 0
    num_hits: int = 0
    num_behind: int = 0
    num_passes: int = 0
    num_copies: int = 0


def play_late(seed: int, totals: Totals, **order: bool) -> None:
    rng = Random(seed)
    config, arrivals = random_scenario(rng)
    plain = play(engine_of(config, is_async=False), arrivals)
    engine, device = late_engine(config, rng, **order)
    check_same(play(engine, arrivals), plain, arrivals, engine.max_model_len)
    assert device.num_copies <= device.num_passes
    totals.num_swaps += engine.totals.num_preemptions_swap
    totals.num_recomputes += engine.totals.num_preemptions_recompute
    totals.num_hits += engine.totals.num_blocks_hit
    totals.num_behind += device.max_behind > 1
    totals.num_passes += device.num_passes
    totals.num_copies += device.num_copies


def play_scenarios(seeds: range, **order: bool) -> Totals:
    totals = Totals()
    for seed in seeds:
        try:
            play_late(seed, totals, **order)
        except Exception as error:
            error.add_note(f"scenario {seed}")
            raise
    return totals


def test_a_late_device_changes_no_token_and_reads_no_freed_block() -> None:
    totals = play_scenarios(range(NUM_SCENARIOS))
    assert totals.num_behind > NUM_SCENARIOS * 3 // 4, "steps were hardly ever behind"
    assert totals.num_swaps > 3
    assert totals.num_recomputes > 3
    assert totals.num_hits > 50
    assert totals.num_copies > totals.num_passes // 2


@pytest.mark.slow
def test_nor_does_it_in_many_more_scenarios() -> None:
    play_scenarios(range(1000, 1000 + NUM_SLOW_SCENARIOS))


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_blocks_that_are_free_one_step_later_make_no_cascade_of_preemptions(mode: str) -> None:
    config = EngineConfig(
        max_model_len=120,
        max_num_batched_tokens=64,
        max_num_seqs=16,
        block_size=4,
        num_device_blocks=60,
        num_host_blocks=400,
        preemption_mode=mode,
        chunk_alignment=4,
        enable_prefix_caching=False,
    )
    requests = [
        EngineRequest(str(number), [LETTERS[number]] * 20, SamplingParams(max_tokens=40 + number % 7, temperature=0.0))
        for number in range(24)
    ]
    num_steps, num_preemptions = {}, {}
    for is_async in (False, True):
        engine = engine_of(config, is_async=is_async)
        play(engine, [Arrival(0, request) for request in requests])
        num_steps[is_async] = sum(record.num_batched_tokens > 0 for record in engine.records_since(0))
        num_preemptions[is_async] = engine.totals.num_preemptions_recompute + engine.totals.num_preemptions_swap
    assert num_preemptions[False] > 10, "the pool was not tight"
    assert num_preemptions[True] <= 1.3 * num_preemptions[False]
    assert num_steps[True] <= 1.1 * num_steps[False]


# --- planted faults: what the runs above would show


def moves_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    return {"waits": False}


def passes_do_not_wait_for_moves(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    return {"is_waited_for": False}


def blocks_are_freed_at_once(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    def free(self: Settlement, sequences: list) -> None:
        for seq in sequences:
            self._blocks.free(seq.seq_id)

    monkeypatch.setattr(Settlement, "free_settled", free)
    return {}


def steps_without_samples_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    monkeypatch.setattr(LateDevice, "record", CpuDevice.record)
    return {}


def tokens_come_from_another_row(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    on_device = LaunchedSamples.on_device

    def shifted(self: LaunchedSamples) -> DeviceTokens | None:
        tokens = on_device(self)
        if tokens is None:
            return None
        count = len(tokens.place_of)
        return DeviceTokens(tokens.token_ids, {seq_id: (p + 1) % count for seq_id, p in tokens.place_of.items()})

    monkeypatch.setattr(LaunchedSamples, "on_device", shifted)
    return {}


FAULTS: list[Callable[[pytest.MonkeyPatch], dict[str, bool]]] = [
    moves_do_not_wait,
    passes_do_not_wait_for_moves,
    blocks_are_freed_at_once,
    steps_without_samples_are_not_waited_for,
    tokens_come_from_another_row,
]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_shows(
    fault: Callable[[pytest.MonkeyPatch], dict[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    order = fault(monkeypatch)
    with pytest.raises(AssertionError):
        play_scenarios(range(NUM_TO_FAIL), **order)
