"""What is written down of steps that overlap: times that do not, lives that sum up, recordings that replay."""

from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from scheduler.life_listener import LifeListener
from scheduler.recording_reader import Recording
from scheduler.replay import Replayer
from scheduler.step_fit import StepTimes
from tests.late_runs import engine_of, late_engine, play, random_scenario
from worker.types import EngineRequest, SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_SCENARIOS = 12


@pytest.mark.parametrize("seed", range(NUM_SCENARIOS))
def test_steps_follow_each_other_and_the_parts_of_a_life_sum_up(seed: int) -> None:
    config, arrivals = random_scenario(Random(seed))
    engine, _ = late_engine(config, Random(seed))
    began_s: dict[str, float] = {}
    add_request = engine.add_request

    def add(request: EngineRequest, now: float) -> None:
        began_s[request.request_id] = now
        add_request(request, now)

    engine.add_request = add  # type: ignore[method-assign]
    played = play(engine, arrivals)
    ended_s = 0.0
    for record in engine.records_since(0):
        assert record.duration_s is not None
        if record.num_batched_tokens:
            assert record.time_s >= ended_s
            assert record.duration_s > 0.0
            ended_s = record.time_s + record.duration_s
    told = [event for event in played.events if event.life is not None and event.life.is_over]
    assert len(told) == len({request_id for request_id, _ in played.answers})
    for event in told:
        life = event.life
        assert life is not None
        assert sum(part.us for part in life.parts) == life.total_us
        assert 0 < life.total_us <= round((engine._clock() - began_s[event.request_id]) * 1e6)


@pytest.mark.parametrize("seed", range(NUM_SCENARIOS))
def test_a_recording_of_steps_that_overlap_replays_step_for_step(seed: int, tmp_path: Path) -> None:
    config, arrivals = random_scenario(Random(seed))
    path = tmp_path / "recording"
    engine, device = late_engine(config, Random(seed), record=str(path))
    play(engine, arrivals)
    engine.close()
    assert device.num_passes > 0
    recording = Recording(path)
    lives, times = LifeListener(recording.config.queue_policy), StepTimes(config.block_size)
    replayed = Replayer(recording, [lives, times]).run()
    assert replayed.difference is None
    assert replayed.num_steps == replayed.num_identical_steps > 0
    assert all(sum(part.us for part in life.parts) == life.total_us for life in lives.reports.values())
    settled = [record for record in engine.records_since(0) if record.num_batched_tokens or record.duration_s]
    assert times.durations_s == pytest.approx([record.duration_s for record in settled])


def test_a_recording_replays_though_an_id_came_again_while_its_last_step_ran(tmp_path: Path) -> None:
    config, _ = random_scenario(Random(0))
    path = tmp_path / "recording"
    engine, _ = late_engine(config, Random(0), record=str(path))
    request = EngineRequest("a", [5, 6, 7], SamplingParams(max_tokens=9))
    engine.add_request(request, engine._clock())
    for _ in range(3):
        engine.step(engine._clock())
    engine.abort("a")
    engine.add_request(request, engine._clock())
    while engine.has_unfinished():
        engine.step(engine._clock())
    engine.close()
    replayed = Replayer(Recording(path), []).run()
    assert replayed.num_requests == 2
    assert replayed.num_steps == replayed.num_identical_steps > 9


def test_a_step_that_was_planned_early_lasts_from_the_end_of_the_one_before() -> None:
    config, _ = random_scenario(Random(0))
    engine = engine_of(config, is_async=True)
    engine.add_request(EngineRequest("a", [5, 6, 7], SamplingParams(max_tokens=4)), engine._clock())
    while engine.has_unfinished():
        engine.step(engine._clock())
    steps = [record for record in engine.records_since(0) if record.num_batched_tokens]
    assert len(steps) == 4
    for before, record in pairwise(steps):
        assert before.duration_s is not None
        assert record.time_s == pytest.approx(before.time_s + before.duration_s)
