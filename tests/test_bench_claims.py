"""The benchmarks behind what the project claims, on made-up machines and a tiny model: what they count and choose."""

import time
from pathlib import Path
from random import Random

import pytest

from benchmarks.capacity import Choice, budgets_of, choose_budget, ratio
from benchmarks.driving import BusyClock, drive, level_missed
from benchmarks.governor import simulated
from benchmarks.machine import Machine, NoisySteps, machine_of, read_machine, record_run
from benchmarks.options import BadValueError
from benchmarks.preemption import auto_over_better, lengths_of, num_pool_blocks
from benchmarks.step_records import make_again, record_s
from deployments.bench.prompts import PromptMaker
from deployments.bench.requests import PlannedRequest
from deployments.bench.slo import Slo
from deployments.bench.traces import TraceRecord
from deployments.bench.workloads import TraceWorkload
from scheduler.config import SchedulerPolicy
from scheduler.recording_reader import Planned, Recording
from scheduler.step_model import StepModel
from tests.tiny_models import VOCAB_SIZE, save_tiny_model
from worker.config import EngineConfig
from worker.engine import Engine

MODEL = StepModel(8e-3, 3e-4, 3e-4, 1e-6, 8e-8, 1e-6, 1e-4)
CHUNKED, DEFAULT = SchedulerPolicy.CHUNKED_PREFILL, SchedulerPolicy.DEFAULT


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), "llama")


def tiny_config(folder: Path, **options: object) -> EngineConfig:
    return EngineConfig(model=str(folder), dtype="float32", max_model_len=256, num_device_blocks=200, **options)


@pytest.mark.parametrize("noise", [0.03, 0.15])
def test_in_the_simulator_the_governor_meets_its_target_and_is_as_fast_as_the_best_static_budget(noise: float) -> None:
    draw = Random(0)
    machine = Machine(MODEL, tuple(draw.lognormvariate(0.0, noise) for _ in range(1000)))
    lengths = [(draw.randint(50, 1000), 64) for _ in range(150)]
    found = simulated(machine, lengths, 12, 60.0, seeds=(0,), budget_step=32)
    assert 0.85 <= found["p99_itl_over_target"] <= 1.1
    assert found["share_of_best_static"] >= 0.9


def test_noise_is_drawn_from_what_was_recorded() -> None:
    steps = NoisySteps(Machine(MODEL, (1.0, 2.0)), Random(0))
    plain_s = MODEL.step_s((1.0, 16, 4, 400, 0, 0))
    assert {round(steps.step_s((1.0, 16, 4, 400, 0, 0)) / plain_s, 9) for _ in range(50)} == {1.0, 2.0}


def test_policy_default_is_offered_only_budgets_that_hold_a_whole_prompt() -> None:
    assert min(budgets_of(DEFAULT, 1900)) == 2048
    assert min(budgets_of(CHUNKED, 1900)) == 32


def test_the_chosen_budget_is_the_one_that_carries_most() -> None:
    draw = Random(1)
    records = [TraceRecord(float(number), draw.randint(200, 4000), 10, ()) for number in range(16)]
    workload = TraceWorkload("made up", records, 0.25, 32)
    machine = Machine(MODEL, (0.95, 1.0, 1.05))
    slo = Slo(2.0, 0.05)
    chunked = choose_budget(machine, workload, 16, CHUNKED, slo)
    default = choose_budget(machine, workload, 16, DEFAULT, slo)
    assert isinstance(chunked, Choice)
    assert chunked.budget < 256
    assert chunked.rate is not None
    assert chunked.rate > (default.rate or 0.0)


def test_a_policy_that_carries_nothing_has_no_ratio() -> None:
    assert ratio({DEFAULT: [1.0, 2.0, 1.0], CHUNKED: [2.0, 6.0, 4.0]}) == 3.0
    assert ratio({DEFAULT: [0.0], CHUNKED: [2.0]}) is None
    assert ratio({CHUNKED: [2.0]}) is None


def test_auto_is_compared_with_the_better_of_the_other_two_round_by_round() -> None:
    assert auto_over_better({"recompute": [10.0, 10.0], "swap": [20.0, 40.0], "auto": [20.0, 36.0]}) == 0.95
    assert num_pool_blocks(2.0) < num_pool_blocks(1.0)
    assert lengths_of(0) == lengths_of(0) != lengths_of(1)


def test_so_many_requests_are_open_at_once_and_every_token_is_noted(tiny: Path) -> None:
    engine = Engine(tiny_config(tiny))
    run = drive(engine, [(20, 5), (40, 1), (10, 8)], 2, Random(0))
    assert (run.num_input_tokens, run.num_output_tokens, len(run.gaps_s)) == (70, 14, 11)
    assert max(record.num_running for record in engine.records_since(-1)) == 2
    assert run.output_tokens_per_s == pytest.approx(14 / run.run_s)


def test_a_level_is_tried_without_waiting_for_arrivals_and_given_up_when_it_is_lost(tiny: Path) -> None:
    clock = BusyClock()
    engine = Engine(tiny_config(tiny), clock)
    plan = [PlannedRequest(number, 1000.0 * number, 30, 20) for number in range(3)]
    prompts = PromptMaker(VOCAB_SIZE, 0, 512)
    began_s = time.monotonic()
    assert level_missed(engine, clock, plan, prompts, 0, Slo(10.0, 10.0)) is None
    assert level_missed(engine, clock, plan, prompts, 1, Slo(10.0, 1e-9)) == "itl"
    assert level_missed(engine, clock, plan, prompts, 2, Slo(1e-9, 10.0)) == "ttft"
    assert time.monotonic() - began_s < 60.0
    assert not engine.has_unfinished()
    engine.check_integrity()


def test_the_record_whose_making_is_timed_is_that_of_the_step(tiny: Path) -> None:
    engine = Engine(tiny_config(tiny))
    drive(engine, [(20, 5), (40, 3)], 2, Random(0))
    records = engine.records_since(-1)
    assert [make_again(record) for record in records] == records
    assert 0.0 < record_s(8) < 1e-3


def test_a_recorded_run_gives_a_model_and_its_noise(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "machine.rec"
    record_run(path, str(tiny), 1, parts=((1, 1), (4, 8)))
    machine = read_machine(path)
    assert machine.model.step_s((1.0, 64, 2, 200, 64 * 64, 0)) > 0.0
    assert len(machine.noise) > 20
    assert 0.3 < sorted(machine.noise)[len(machine.noise) // 2] < 3.0


def test_a_recording_that_is_decided_otherwise_now_is_refused_by_name(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "machine.rec"
    record_run(path, str(tiny), 1, parts=((1, 1),))
    first_digest = next(event.digest for event in Recording(path).events() if isinstance(event, Planned))
    path.write_text(path.read_text().replace(first_digest, "0" * len(first_digest), 1))
    with pytest.raises(BadValueError, match=r"--recording: .*machine\.rec: this version decides step 1 otherwise"):
        machine_of(path, str(tiny), 1)
