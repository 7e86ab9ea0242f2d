"""The comparison with other engines: rows, prompts, and what becomes of a peer that fails. The peers are stand-ins."""

import sys
from pathlib import Path

import pytest

from benchmarks.peers.__main__ import run, table
from benchmarks.peers.drivers import FOLDER, PeerError, Setting, peers_at_hand
from benchmarks.peers.rows import ROWS, measure, prompts_of

STAND_IN = """
import sys, time
sys.path.insert(0, {folder!r})
from rows import serve

def load(arguments):
    print("noise that a library prints")
    def generate(prompts, num_output_tokens):
        if {dies_at} == len(prompts):
            sys.exit("out of memory")
        time.sleep({seconds_per_prompt} * len(prompts))
        return [num_output_tokens] * len(prompts)
    return {name!r}, generate

serve(load)
"""


def set_up(folder: Path, engine: str, *, seconds_per_prompt: float = 0.001, dies_at: int = -1) -> None:
    """An environment whose interpreter runs a stand-in, whatever driver it is given."""
    binaries = folder / engine / "bin"
    binaries.mkdir(parents=True)
    script = binaries / "stand_in.py"
    script.write_text(
        STAND_IN.format(
            folder=str(FOLDER), name=f"fake {engine}", seconds_per_prompt=seconds_per_prompt, dies_at=dies_at
        )
    )
    python = binaries / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}" "$@"\n')
    python.chmod(0o755)


def setting(folder: Path) -> Setting:
    return Setting(folder, folder, folder / "some.gguf", num_threads=1)


def test_prompts_are_new_in_each_round_and_as_long_as_the_row_says() -> None:
    for name, row in ROWS.items():
        prompts = prompts_of(name, 0)
        assert [len(prompt) for prompt in prompts] == [row.num_input_tokens] * row.num_requests
        assert prompts == prompts_of(name, 0)
        assert prompts != prompts_of(name, 1)


def test_a_rate_counts_the_tokens_that_the_row_names() -> None:
    assert ROWS["decode_b8"].num_counted_tokens == 8 * 128
    assert ROWS["prefill_2048"].num_counted_tokens == 2048
    assert ROWS["mixed_64x512"].num_counted_tokens == 64 * 576


def test_an_answer_of_another_length_makes_no_number() -> None:
    with pytest.raises(RuntimeError, match="127"):
        measure("decode_b1", 0, lambda prompts, num_output_tokens: [num_output_tokens - 1])


def test_engines_that_are_asked_in_turn_give_a_result_a_row(tmp_path: Path) -> None:
    set_up(tmp_path, "vllm")
    set_up(tmp_path, "llama", seconds_per_prompt=0.05)
    results = list(run(setting(tmp_path), ["vllm", "llama"], ["decode_b1", "decode_b8"], 2))
    assert [(item["row"], item["engine"]) for item in results] == [
        ("decode_b1", "fake vllm"),
        ("decode_b1", "fake llama"),
        ("decode_b8", "fake vllm"),
        ("decode_b8", "fake llama"),
    ]
    assert all(len(item["runs"]) == 2 and item["stallfree_ratio"] is None for item in results)
    assert 128 / 0.06 * 0.2 < results[1]["tokens_per_s"] <= 128 / 0.05
    assert "fake llama" in table(results)


def test_a_peer_that_is_missing_or_dies_is_reported_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    set_up(tmp_path, "vllm")
    set_up(tmp_path, "llama", dies_at=8)
    rows = ["decode_b8", "decode_b1"]
    results = list(run(setting(tmp_path), ["transformers", "llama", "vllm"], rows, 2))
    assert [(item["row"], item["engine"]) for item in results] == [(row, "fake vllm") for row in rows]
    reported = capsys.readouterr().err
    assert "transformers is not set up" in reported
    assert "decode_b8: llama ended with exit code 1" in reported


def test_an_environment_that_is_missing_is_named_with_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"setup\.sh .* vllm"):
        setting(tmp_path).command("vllm")


def test_the_peers_that_are_set_up_are_found_and_the_others_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(PeerError, match=r"vllm is not set up.*llama is not set up.*transformers is not set up"):
        peers_at_hand(setting(tmp_path))
    set_up(tmp_path, "llama")
    assert peers_at_hand(setting(tmp_path)) == ["llama"]
    assert "vllm is not set up" in capsys.readouterr().err
