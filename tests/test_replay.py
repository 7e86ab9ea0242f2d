"""A live run of the real engine, recorded: replayed to the decision, predicted, and asked what if."""

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import torch

from deployments.cli.main import main
from scheduler.recording_reader import Recording
from scheduler.replay import Replayer
from scheduler.run_report import RunReport
from tests.live_runs import random_live_requests, run_live
from tests.tiny_models import VOCAB_SIZE, save_tiny_model
from worker.config import ConfigError, EngineConfig
from worker.engine import Engine

NUM_REQUESTS = 500
BUDGET = 64


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny-llama"), "llama")


@pytest.fixture(scope="module")
def recording(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """500 requests, some with several samples or beams, in a pool that is too small for what runs at once."""
    path = tmp_path_factory.mktemp("recording") / "live.jsonl"
    engine = Engine(
        EngineConfig(
            model=str(model),
            dtype="float32",
            device="cpu",
            max_model_len=256,
            num_device_blocks=50,
            num_host_blocks=20,
            max_num_batched_tokens=BUDGET,
            max_num_seqs=24,
            num_threads=1,
            record=str(path),
        )
    )
    requests = random_live_requests(
        Random(5), NUM_REQUESTS, vocab_size=VOCAB_SIZE, mean_gap_s=0.001, prompt_tokens=(4, 100),
        output_tokens=(2, 24),
    )  # fmt: skip
    run_live(engine, requests)
    engine.close()
    assert engine.totals.num_preemptions_recompute + engine.totals.num_preemptions_swap > 0
    return path


def answer(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    capsys.readouterr()
    return main(list(options)), capsys.readouterr().out


def test_every_decision_of_a_live_run_is_found_again(
    recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exit_code, text = answer(capsys, "replay", str(recording), "--json")
    result = json.loads(text)
    assert exit_code == 0
    assert result["num_requests"] == NUM_REQUESTS
    assert result["num_identical_steps"] == result["num_steps"] > NUM_REQUESTS / 2
    assert result["measured"]["num_cancelled"] > 0
    assert sum(result["measured"]["preemptions"].values()) > 0
    assert result["measured"]["cache"]["num_hit_blocks"] > 0
    assert answer(capsys, "replay", str(recording)) == (
        0, f"{NUM_REQUESTS} requests, {result['num_steps']:,} steps, 100.0% identical\n"
    )  # fmt: skip


def test_a_replay_counts_every_request_once_whatever_became_of_it(recording: Path) -> None:
    replayer = Replayer(Recording(recording), [])
    report = RunReport(replayer.blocks)
    replayer.listeners.append(report)
    replayer.run()
    counts = report.as_dict()
    ended = counts["num_finished"] + counts["num_cancelled"] + counts["num_failed"] + counts["num_refused"]
    assert ended == counts["num_requests"] == NUM_REQUESTS
    assert replayer.blocks.num_used_device_blocks == 0


def test_half_the_budget_names_the_steps_that_differ(
    recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("replay", str(recording), "--max-num-batched-tokens", str(BUDGET // 2))
    exit_code, text = answer(capsys, *options, "--json")
    result = json.loads(text)
    assert exit_code == 0
    first = result["first_recorded_difference"]
    assert first["step"] >= 1
    assert first["before"] != first["after"]
    assert 0 < result["num_different_steps"] <= result["num_compared_steps"]
    assert [step["step"] for step in result["different_steps"]] == sorted(
        step["step"] for step in result["different_steps"]
    )
    assert all(step["before"] != step["after"] for step in result["different_steps"])
    assert result["what_if"]["num_requests"] == NUM_REQUESTS
    assert result["what_if"]["num_steps"] > result["simulated"]["num_steps"]
    _, text = answer(capsys, *options)
    assert f"the first recorded step that is decided otherwise is step {first['step']}:" in text
    assert "simulated as asked" in text


def test_a_what_if_that_changes_nothing_differs_nowhere(
    recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, text = answer(capsys, "replay", str(recording), "--max-num-batched-tokens", str(BUDGET), "--json")
    result = json.loads(text)
    assert result["first_recorded_difference"] is None
    assert result["num_different_steps"] == 0
    assert result["what_if"] == result["simulated"]


@pytest.mark.parametrize(
    "options",
    [
        ("--block-size", "32"),
        ("--no-enable-prefix-caching",),
        ("--num-device-blocks", "400"),
        ("--preemption-mode", "recompute"),
        ("--queue-policy", "priority"),
        ("--queue-policy", "fair", "--tenant-weights", "t0=1,t1=3"),
        ("--scheduler-policy", "default", "--max-num-batched-tokens", "256"),
    ],
    ids=" ".join,
)
def test_other_options_of_the_scheduler_can_be_asked_for(
    options: tuple[str, ...], recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exit_code, text = answer(capsys, "replay", str(recording), *options, "--json")
    what_if = json.loads(text)["what_if"]
    assert exit_code == 0
    ended = what_if["num_finished"] + what_if["num_cancelled"] + what_if["num_failed"]
    assert ended == what_if["num_requests"] == NUM_REQUESTS
    assert (what_if["cache"]["num_hit_blocks"] > 0) == ("--no-enable-prefix-caching" not in options)
    if "--num-device-blocks" in options:
        assert what_if["preemptions"] == {"recompute": 0, "swap": 0}


def test_the_prediction_and_its_errors_are_printed(
    recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """How large they are is the machine's business: other work on it slows some steps and not others."""
    exit_code, text = answer(capsys, "replay", str(recording), "--predict")
    assert exit_code == 0
    assert "error of the simulated medians: ttft_s" in text
    _, text = answer(capsys, "replay", str(recording), "--predict", "--json")
    result = json.loads(text)
    assert set(result["prediction_errors"]) == {"ttft_s", "inter_token_s", "end_to_end_s"}
    assert result["step_model"]["base_s"] >= 0.0
    assert result["simulated"]["num_requests"] == NUM_REQUESTS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--block-size", "24"), "--block-size: 24 is not a multiple of the recorded 16"),
        (("--kv-cache-memory", "1GiB"), "--kv-cache-memory: says nothing without a model"),
        (("--record", "other"), "--record: a replay records nothing"),
        (("--attention-backend", "triton"), "--attention-backend: says nothing without a model"),
        (("--model", "demo"), "--model: says nothing without a model"),
        (("--async-scheduling",), "--async-scheduling: says nothing without a model"),
        (("--max-num-batched-tokens", "0"), "--max-num-batched-tokens: must be at least 1"),
        (("--num-device-blocks", "3"), "--num-device-blocks: 3 blocks of 16 cannot hold one sequence"),
        (("--fit", "nothing-here"), "--fit: nothing-here: No such file"),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_code_2(
    options: tuple[str, ...], message: str, recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(recording), *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"stallfree: error: {message}")
    assert error.count("\n") == 1


def test_a_replay_that_differs_ends_with_exit_code_1(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = recording.read_text().splitlines(keepends=True)
    place = [place for place, line in enumerate(lines) if line.startswith('{"schedule"')][9]
    planned = json.loads(lines[place])
    lines[place] = json.dumps({**planned, "digest": "0" * 12}) + "\n"
    (tmp_path / "altered").write_text("".join(lines))
    exit_code, text = answer(capsys, "replay", str(tmp_path / "altered"))
    assert exit_code == 1
    assert "100.0%" not in text
    assert "step 10 at" in text


def test_a_recording_into_a_folder_that_is_not_there_is_refused_before_anything_is_loaded(
    model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="record: there is no folder"):
        Engine(EngineConfig(model=str(model), record=str(tmp_path / "no" / "file")))


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(1200)
def test_the_run_of_the_demo_model_is_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """500 requests; the errors are printed. The goal is 9%; on a machine with other work they are larger."""
    path = tmp_path / "demo.rec"
    engine = Engine(EngineConfig(device="cpu", max_model_len=1024, num_device_blocks=120, record=str(path)))
    requests = random_live_requests(
        Random(8), NUM_REQUESTS, vocab_size=engine.vocab_size, mean_gap_s=0.2, prompt_tokens=(10, 200),
        output_tokens=(4, 40),
    )  # fmt: skip
    run_live(engine, requests)
    engine.close()
    exit_code, text = answer(capsys, "replay", str(path), "--predict")
    with capsys.disabled():
        print(f"\n{text}")
    assert exit_code == 0
    assert f"{NUM_REQUESTS} requests" in text
    assert "100.0% identical" in text
    assert "error of the simulated medians" in text
