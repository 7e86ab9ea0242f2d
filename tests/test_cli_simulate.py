"""`stallfree simulate`: its options, what it prints, and how it refuses."""

import json
from pathlib import Path
from random import Random

import pytest

from deployments.cli.main import main

FIELDS = {
    "trace", "simulated_s", "wall_s", "speedup", "num_requests", "num_refused", "num_finished", "num_cancelled",
    "num_failed", "num_steps", "num_prompt_tokens", "num_output_tokens", "requests_per_s", "output_tokens_per_s",
    "ttft_s", "inter_token_s", "end_to_end_s", "preemptions", "max_num_preemptions_of_a_request",
    "num_discarded_tokens", "num_blocks_swapped_out", "num_blocks_swapped_in", "num_blocks_copied",
    "max_num_device_blocks_used", "cache", "blocked_request_s", "step_model", "options",
}  # fmt: skip


@pytest.fixture
def csv_trace(tmp_path: Path) -> Path:
    rng = Random(1)
    lines = ["arrival_s,input_tokens,output_tokens,priority,tenant"]
    lines += [
        f"{n * 0.05:.2f},{rng.randint(1, 400)},{rng.randint(0, 60)},{n % 3},{'ab'[n % 2]}" for n in range(120)
    ]
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def hashed_trace(tmp_path: Path) -> Path:
    """Every prompt begins with the same 1,024 tokens."""
    lines = [
        {"timestamp": n * 100, "input_length": 1500, "output_length": 5, "hash_ids": [0, 1, 2 + n]}
        for n in range(20)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def simulated(capsys: pytest.CaptureFixture[str], path: Path, *options: str) -> dict:
    capsys.readouterr()
    assert main(["simulate", "--trace", str(path), "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_json_has_the_documented_fields(csv_trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = simulated(capsys, csv_trace)
    assert set(result) == FIELDS
    assert result["num_requests"] == result["num_finished"] == 120
    assert set(result["ttft_s"]) == {"p50", "p90", "p99"}
    document = (Path(__file__).parent.parent / "docs" / "simulation.md").read_text()
    assert [name for name in FIELDS if f"`{name}`" not in document] == []


def test_the_table_says_how_much_was_simulated(csv_trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--trace", str(csv_trace), "--limit", "50"]) == 0
    text = capsys.readouterr().out
    assert "first token p50/p90/p99" in text
    assert " s simulated in " in text


def test_a_limit_takes_the_first_requests(csv_trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulated(capsys, csv_trace, "--limit", "7")["num_requests"] == 7


def test_options_of_the_engine_reach_the_scheduler(
    csv_trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    endless = simulated(capsys, csv_trace)
    assert simulated(capsys, csv_trace, "--num-device-blocks", "endless")["options"] == endless["options"]
    tight = simulated(
        capsys, csv_trace, "--num-device-blocks", "60", "--num-host-blocks", "100", "--preemption-mode", "swap",
        "--max-num-seqs", "8", "--max-num-batched-tokens", "128", "--queue-policy", "priority",
    )  # fmt: skip
    assert tight["preemptions"]["swap"] > 0
    assert tight["max_num_device_blocks_used"] <= 59
    assert tight["ttft_s"]["p50"] > endless["ttft_s"]["p50"]
    assert tight["options"]["queue_policy"] == "priority"
    assert sum(tight["blocked_request_s"].values()) > 0
    whole = simulated(capsys, csv_trace, "--scheduler-policy", "default")
    assert whole["options"]["max_num_batched_tokens"] == whole["options"]["max_model_len"]


def test_requests_that_are_too_long_are_counted_as_refused(
    csv_trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = simulated(capsys, csv_trace, "--max-model-len", "200")
    assert 0 < result["num_refused"] < 120
    assert result["num_finished"] == 120 - result["num_refused"]


@pytest.mark.parametrize("block_size", [16, 512])
def test_prefixes_that_hashes_share_are_found(
    block_size: int, hashed_trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--block-size", str(block_size), "--concurrency", "1")
    cache = simulated(capsys, hashed_trace, *options)["cache"]
    assert cache["num_hit_blocks"] == 19 * 1024 // block_size
    assert cache["num_queried_blocks"] == 20 * (1500 // block_size)
    off = simulated(capsys, hashed_trace, *options, "--no-enable-prefix-caching")["cache"]
    assert off["num_hit_blocks"] == 0


def test_a_simulation_can_be_recorded_replayed_and_fitted(
    csv_trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = str(tmp_path / "run.rec")
    first = simulated(capsys, csv_trace, "--step-model", "cpu-demo", "--record", recording)
    assert main(["replay", recording]) == 0
    assert "100.0% identical" in capsys.readouterr().out
    again = simulated(capsys, csv_trace, "--fit", recording)
    assert again["step_model"]["name"] == recording
    assert again["ttft_s"]["p50"] == pytest.approx(first["ttft_s"]["p50"], rel=0.01)


def test_a_plot_is_a_png(csv_trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "run.png"
    simulated(capsys, csv_trace, "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the first line names no column arrival_s"),
        ("arrival_s,input_tokens\n1,2\n", "the first line names no column output_tokens"),
        ("arrival_s,input_tokens,output_tokens\n", "holds no request"),
        ("arrival_s,input_tokens,output_tokens\n0,1,1\n0,what,1\n", "line 3: invalid literal"),
        ("arrival_s,input_tokens,output_tokens\n0,1\n", "line 2: "),
        ("arrival_s,input_tokens,output_tokens\n0,0,1\n", "line 2 has a time or a length that cannot be"),
        ("arrival_s,input_tokens,output_tokens\nnan,1,1\n", "line 2 has a time or a length that cannot be"),
        ("{not json\n", "line 1: "),
        ('{"timestamp": 1, "input_length": 5}\n', "line 1: KeyError: 'output_length'"),
        (
            '{"timestamp": 1, "input_length": 600, "output_length": 5, "hash_ids": [1]}\n',
            "line 1 has too few hash_ids",
        ),
    ],
)
def test_a_trace_that_is_none_is_refused_by_its_line(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace"
    path.write_text(content)
    assert main(["simulate", "--trace", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"stallfree: error: --trace: {path}")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--limit", "0"), "--limit: must be at least 1"),
        (("--concurrency", "0"), "--concurrency: must be at least 1"),
        (("--num-device-blocks", "many"), "--num-device-blocks: must be a whole number, got 'many'"),
        (("--num-device-blocks", "3"), "--num-device-blocks: 3 blocks of 16 cannot hold one sequence"),
        (("--kv-cache-memory", "1GiB"), "--kv-cache-memory: says nothing without a model"),
        (("--block-size", "0"), "--block-size: must be at least 1"),
        (("--max-num-seqs", "600", "--max-num-batched-tokens", "512"), "--max-num-batched-tokens: 512 is below"),
        (("--fit", "nothing-here"), "--fit: nothing-here: No such file"),
        (("--plot", "run.gif"), "--plot: writes PNG"),
        (("--plot", "no-folder-here/run.png"), "--plot: there is no folder no-folder-here"),
        (("--record", "no-folder-here/run"), "--record: no-folder-here/run: No such file"),
        (("--step-model", "abacus"), "--step-model: invalid choice"),
        (("--fit", "x", "--step-model", "gpu-8b"), "--step-model: not allowed with argument --fit"),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_code_2(
    options: tuple[str, ...], message: str, csv_trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if options[0] == "--plot":
        pytest.importorskip("matplotlib")
    assert main(["simulate", "--trace", str(csv_trace), *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"stallfree: error: {message}")
    assert error.count("\n") == 1


def test_a_recording_of_something_else_is_no_model(
    csv_trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--trace", str(csv_trace), "--fit", str(csv_trace)]) == 2
    assert "is not a recording" in capsys.readouterr().err


def test_a_trace_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--trace", "nothing-here"]) == 2
    assert capsys.readouterr().err == "stallfree: error: --trace: nothing-here: No such file or directory\n"
