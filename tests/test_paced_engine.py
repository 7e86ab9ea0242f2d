"""The paced engine gives the answers that its integers say, whatever else runs, and takes the time it was told to."""

import time
from pathlib import Path

import pytest

from tests.paced_engine import PacedEngine, paced_model
from tests.tiny_models import save_tiny_model
from tests.tiny_tokenizer import save_tiny_tokenizer
from worker.config import EngineConfig
from worker.types import EngineRequest, SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_tokenizer(save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", "llama"))


def run(engine: PacedEngine, requests: list[EngineRequest]) -> dict[tuple[str, int], list[int]]:
    for request in requests:
        engine.add_request(request, time.monotonic())
    answers: dict[tuple[str, int], list[int]] = {}
    while engine.has_unfinished():
        for event in engine.step(time.monotonic()):
            answers.setdefault((event.request_id, event.index), []).extend(event.token_ids)
    engine.check_integrity()
    return answers


def test_answers_are_those_of_an_undisturbed_run_in_a_pool_that_is_too_small(folder: Path):
    config = EngineConfig(model=str(folder), max_model_len=400, num_device_blocks=60, num_host_blocks=60)
    engine = PacedEngine(config, step_s=0.0)
    requests = [
        EngineRequest(
            str(i),
            [5 + i] * (20 + 7 * i),
            SamplingParams(max_tokens=40, n=1 + i % 3, temperature=i % 2, seed=i, ignore_eos=True),
        )
        for i in range(12)
    ]
    answers = run(engine, requests)
    assert engine.totals.num_preemptions_swap + engine.totals.num_preemptions_recompute > 0
    model = paced_model(folder)
    for request in requests:
        for index in range(request.params.n):
            expected = model.answer(request.prompt_token_ids, request.params, index)
            assert answers[request.request_id, index] == expected


def test_a_resumed_answer_goes_on_as_if_nothing_had_happened(folder: Path):
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=3)
    whole = paced_model(folder).answer([9] * 30, params)
    engine = PacedEngine(EngineConfig(model=str(folder)), step_s=0.0)
    answers = run(engine, [EngineRequest("again", [9] * 30, params, output_token_ids=[whole[:8]])])
    assert answers["again", 0] == whole[8:]


def test_a_step_lasts_as_long_as_it_was_told(folder: Path):
    engine = PacedEngine(EngineConfig(model=str(folder)), step_s=0.02)
    began_s = time.monotonic()
    run(engine, [EngineRequest("one", [9, 9], SamplingParams(max_tokens=10))])
    assert engine.totals.num_steps == 10
    assert time.monotonic() - began_s >= 10 * 0.02
