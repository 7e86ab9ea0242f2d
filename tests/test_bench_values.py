"""The benchmarks' command lines: values of no use end every module with one line and status 2, before it begins."""

import importlib
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import BEGIN, END
from benchmarks.options import Parser, run_program
from worker.config import ConfigError

NOWHERE = "/nowhere/at-all"


def refused(module: str, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    main = importlib.import_module(f"{module}.__main__" if module in PACKAGES else module).main
    with pytest.raises(SystemExit) as ending:
        main()
    assert ending.value.code == 2


PACKAGES = ("benchmarks", "benchmarks.peers", "benchmarks.servers")
MODEL = ("--model", NOWHERE)
NO_MODEL = f"--model: there is no folder {NOWHERE}"


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        ("benchmarks", ("--write", NOWHERE), f"--write: there is no file {NOWHERE}"),
        ("benchmarks", ("--write", __file__), "there is no place for the table"),
        ("benchmarks.bench_scheduler", ("--junk",), "unrecognized arguments: --junk"),
        ("benchmarks.capacity", ("--trace", NOWHERE), f"--trace: cannot read {NOWHERE}: No such file"),
        ("benchmarks.capacity", ("--trace", "TRACE", "--recording", NOWHERE), "--recording: there is no file"),
        ("benchmarks.capacity", ("--trace", "TRACE", "--recording", "TRACE"), "--recording: "),
        ("benchmarks.capacity", ("--trace", "TRACE", "--rounds", "-1"), "--rounds: must be at least 0"),
        ("benchmarks.capacity", ("--trace", "TRACE", "--num-requests", "0"), "--num-requests: must be at least 2"),
        ("benchmarks.capacity", ("--trace", "TRACE", "--slo", "0"), "--slo: must be a number above 0"),
        ("benchmarks.capacity", ("--trace", "TRACE", "--slo-ttft-ms", "nan"), "--slo-ttft-ms: must be a number"),
        ("benchmarks.capacity", ("--trace", "TRACE", "--precision", "0"), "--precision: must be a number above 0"),
        ("benchmarks.capacity", ("--trace", "TRACE", *MODEL), NO_MODEL),
        ("benchmarks.capacity", ("--trace", "LONG"), "--trace: a request of 50064 tokens"),
        ("benchmarks.capacity", ("--trace", "AT_ONCE"), "--trace: all requests arrive at the same moment"),
        ("benchmarks.engine", ("--repeats", "0"), "--repeats: must be at least 1"),
        ("benchmarks.engine", ("--num-threads", "0"), "--num-threads: must be at least 1"),
        ("benchmarks.engine", ("--dtype", "int3"), "--dtype: invalid choice"),
        ("benchmarks.engine", ("--rows", "decode_b1", "decode_b1"), "--rows: decode_b1 is named twice"),
        ("benchmarks.engine", MODEL, NO_MODEL),
        ("benchmarks.engine", (*MODEL, "--peers"), NO_MODEL),
        ("benchmarks.governor", ("--trace", NOWHERE), f"--trace: cannot read {NOWHERE}: No such file"),
        ("benchmarks.governor", ("--trace", "TRACE", "--recording", NOWHERE), "--recording: there is no file"),
        ("benchmarks.governor", ("--trace", "TRACE", "--recording", "TRACE"), "--recording: "),
        ("benchmarks.governor", ("--trace", "TRACE", "--concurrency", "0"), "--concurrency: must be from 1 to 496"),
        ("benchmarks.governor", ("--trace", "TRACE", "--runs", "-1"), "--runs: must be at least 0"),
        ("benchmarks.governor", ("--trace", "TRACE", "--runs", "0", "--live-only"), "--runs: 0 with --live-only"),
        ("benchmarks.governor", ("--trace", "TRACE", "--target-itl-ms", "0"), "--target-itl-ms: must be"),
        ("benchmarks.governor", ("--trace", "TRACE", *MODEL), NO_MODEL),
        ("benchmarks.capacity", ("--precision", "1"), "--precision: must be above 0 and below 1"),
        ("benchmarks.engine", ("--environments", "/"), "--environments: says nothing without --peers"),
        ("benchmarks.grammar_libraries", (), "name"),
        ("benchmarks.grammar_libraries", ("junk",), "name: invalid choice"),
        ("benchmarks.http", ("--environments", NOWHERE), "--environments: there is no folder"),
        ("benchmarks.http", ("--environments", "/", "--rounds", "0"), "--rounds: must be at least 1"),
        ("benchmarks.http", ("--environments", "/", "--duration-s", "9"), "--duration-s: must be at least 10"),
        ("benchmarks.http", ("--environments", "/", "--first-port", "65434"), "--first-port: the last of so many"),
        ("benchmarks.http", ("--environments", "/", "--logs", NOWHERE), "--logs: there is no folder"),
        ("benchmarks.http", ("--environments", "/", "--write", __file__), "there is no place for the table"),
        ("benchmarks.http", ("--environments", "/", "--option", "x"), "--option: must read NAME=VALUE"),
        ("benchmarks.http", ("--environments", "/", *MODEL), NO_MODEL),
        ("benchmarks.http", ("--environments", "/", "--servers", "vllm", "vllm"), "--servers: vllm is named twice"),
        ("benchmarks.http", ("--environments", "/", "--rows", "chats", "chats"), "--rows: chats is named twice"),
        ("benchmarks.long_prompt_gap", ("--num-threads", "0"), "--num-threads: must be at least 1"),
        ("benchmarks.long_prompt_gap", MODEL, NO_MODEL),
        ("benchmarks.peers", ("--environments", NOWHERE), "--environments: there is no folder"),
        ("benchmarks.peers", ("--environments", "/", "--rounds", "0"), "--rounds: must be at least 1"),
        ("benchmarks.peers", ("--environments", "/", "--option", "junk=3"), "--option: the engine has none of"),
        ("benchmarks.peers", ("--environments", "/", "--gguf", NOWHERE), "--gguf: there is no file"),
        ("benchmarks.peers", ("--environments", "/", *MODEL), NO_MODEL),
        ("benchmarks.peers", ("--environments", "/", "--engines", "vllm", "vllm"), "--engines: vllm is named twice"),
        ("benchmarks.preemption", ("--rounds", "0"), "--rounds: must be at least 1"),
        ("benchmarks.preemption", ("--oversubscription", "0"), "--oversubscription: must be at least 1"),
        ("benchmarks.preemption", ("--oversubscription", "nan"), "--oversubscription: must be a number"),
        ("benchmarks.preemption", ("--oversubscription", "1e9"), "--oversubscription: leaves less than"),
        ("benchmarks.preemption", MODEL, NO_MODEL),
        ("benchmarks.python_per_step", ("--running", "0"), "--running: must be from 1 to 2048"),
        ("benchmarks.python_per_step", MODEL, NO_MODEL),
        ("benchmarks.servers", ("vllm", "--environments", "/", "--port", "65500"), "--port: must be from 1 to 65435"),
        ("benchmarks.servers", ("vllm", "--environments", "/", "--for-s", "-1"), "--for-s: must be a number above 0"),
        ("benchmarks.serving", MODEL, NO_MODEL),
        ("benchmarks.serving_overload", ("--seconds", "0"), "--seconds: must be a number above 0"),
        ("benchmarks.step_records", ("--running", "0"), "--running: must be from 1 to 2048"),
        ("benchmarks.step_records", MODEL, NO_MODEL),
    ],
)
def test_a_value_of_no_use_is_refused_in_one_line(
    module: str,
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traces = {"TRACE": ("0,400", "1,300"), "LONG": ("0,200000", "1,300"), "AT_ONCE": ("0,400", "0,300")}
    for name, rows in traces.items():
        lines = ["arrival_s,input_tokens,output_tokens", *(f"{row},9" for row in rows)]
        (tmp_path / name).write_text("\n".join(lines))
    placed = tuple(str(tmp_path / argument) if argument in traces else argument for argument in arguments)
    refused(module, placed, monkeypatch)
    error = capsys.readouterr().err
    assert error.startswith(f"python -m {module}: error: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ((END + BEGIN).encode(), "there is no place for the table"),
        (BEGIN.encode(), "there is no place for the table"),
        (b"\xff", "can't decode"),
    ],
)
def test_a_document_without_a_place_for_the_table_is_refused(
    content: bytes, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    document = tmp_path / "document.md"
    document.write_bytes(content)
    refused("benchmarks", ("--write", str(document)), monkeypatch)
    error = capsys.readouterr().err
    assert f"--write: {document}: " in error
    assert reason in error
    assert error.count("\n") == 1


def test_help_is_help_and_measures_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_scheduler", "--help"])
    with pytest.raises(SystemExit) as ending:
        importlib.import_module("benchmarks.bench_scheduler").main()
    assert ending.value.code == 0
    assert capsys.readouterr().out.startswith("usage: python -m benchmarks.bench_scheduler")


def test_what_shows_only_inside_is_refused_alike_and_faults_are_not_hidden(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = Parser("benchmarks.x", "doc")
    with pytest.raises(SystemExit), parser.refusing():
        raise ConfigError("num_threads", "must be at least 1")
    assert capsys.readouterr().err == "python -m benchmarks.x: error: --num-threads: must be at least 1\n"
    with pytest.raises(ValueError, match="a fault"), parser.refusing():
        raise ValueError("a fault")


def interrupted() -> int:
    raise KeyboardInterrupt


def test_a_program_ends_with_its_status_or_with_130_when_interrupted() -> None:
    for main, status in ((lambda: 1, 1), (lambda: None, None), (interrupted, 130)):
        with pytest.raises(SystemExit) as ending:
            run_program(main)
        assert ending.value.code == status
