"""The comparison through HTTP: how servers are started, what is said of them, and its table. Stand-ins only."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.documents import with_table
from benchmarks.http import main, measure, session_of
from benchmarks.http_rows import GOALS, Row, all_rows
from benchmarks.http_table import BEGIN, END, Measured, goal_lines, table
from benchmarks.peers.drivers import PeerError, Setting
from benchmarks.servers.commands import HOST, SERVERS
from benchmarks.servers.process import RunningServer
from deployments.bench.comparison import Compared
from deployments.bench.prompts import FALLBACK_VOCAB_SIZE, PromptMaker
from tests.bench_stand_ins import MORTAL_STAND_IN, ROOT, STAND_IN, free_ports, stand_in
from tests.server_process import free_port


def set_up(folder: Path) -> Setting:
    """Environments whose programs are there, and do nothing."""
    for environment in ("vllm", "llama", "transformers", "ray-llm"):
        binaries = folder / environment / "bin"
        binaries.mkdir(parents=True)
        for program in ("python", "llama-server", "transformers"):
            (binaries / program).write_text("#!/bin/sh\n")
    return Setting(folder / "model", folder, folder / "some.gguf", 2, ("max_num_seqs=9",))


def test_every_server_listens_on_loopback_at_its_port_and_gets_the_model(tmp_path: Path) -> None:
    setting = set_up(tmp_path)
    for name, command_of in SERVERS.items():
        made = command_of(setting, 8123)
        assert made.name == name
        assert {HOST, "8123"} <= set(made.command)
        assert str(tmp_path / ("some.gguf" if name.startswith("llama") else "model")) in made.command
        assert made.note


def test_ours_runs_once_with_its_defaults_and_once_as_the_policy_default(tmp_path: Path) -> None:
    setting = set_up(tmp_path)
    plain, default = (SERVERS[name](setting, 8123).command for name in ("stallfree", "stallfree-default"))
    added = default[len(plain) - 2 : -2]
    assert "--scheduler-policy" not in plain
    assert added == ["--scheduler-policy", "default", "--max-num-batched-tokens", "8192"]
    assert plain[-2:] == default[-2:] == ["--max-num-seqs", "9"]


def test_a_server_that_is_not_set_up_is_named_with_the_command_that_makes_it(tmp_path: Path) -> None:
    for name, folder in {"vllm": "vllm", "llama": "llama", "llama-python": "llama", "ray-llm": "ray-llm"}.items():
        with pytest.raises(PeerError, match=rf"setup\.sh .* {folder}"):
            SERVERS[name](Setting(tmp_path, tmp_path, tmp_path / "some.gguf", 1), 8123)


def column(name: str, row: Row, value: float, ratio: float, num_failed: int = 0) -> Compared:
    quantities = [figure.quantity for figure in row.figures]
    return Compared(name, 2, num_failed, dict.fromkeys(quantities, value), dict.fromkeys(quantities, ratio))


def test_the_table_has_a_line_for_each_figure_with_theirs_over_ours_and_who_is_best() -> None:
    rows = all_rows(25.0)
    one, many = rows["one_stream"], rows["streams"]
    measured = [
        Measured(one, [column("stallfree", one, 0.05, 1.0), column("vllm", one, 0.025, 0.5)]),
        Measured(many, [column("stallfree", many, 1000.0, 1.0), column("vllm", many, 400.0, 0.4, num_failed=3)]),
    ]
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in table(measured, ["stallfree", "llama", "vllm"]).splitlines()
    ]
    assert lines[0] == ["", "stallfree", "vllm", "best"]
    assert lines[2] == [one.figures[0].title, "50 ms", "25 ms (0.50x)", "vllm"]
    assert lines[3] == [many.figures[0].title, "1,000", "400 (0.40x), 3 failed", "stallfree"]
    document = f"before\n{BEGIN}\nold\n{END}\nafter"
    assert with_table(document, "new", BEGIN, END) == f"before\n{BEGIN}\nnew\n{END}\nafter"


def test_a_goal_is_kept_missed_or_not_measured_and_says_which() -> None:
    rows = all_rows(25.0)
    one, many = rows["one_stream"], rows["streams"]
    measured = [
        Measured(one, [column("stallfree", one, 0.05, 1.0), column("vllm", one, 0.05, 1.0)]),
        Measured(many, [column("stallfree", many, 1200.0, 1.0), column("vllm", many, 1000.0, 1000 / 1200)]),
        Measured(rows["chats"], [column("stallfree", rows["chats"], 0.05, 1.0)], {"vllm": "gone"}),
    ]
    lines = goal_lines(measured, GOALS)
    assert [line.split(":")[0] for line in lines] == ["not measured", "not measured", "kept", "MISSED"]
    assert lines[3].endswith("at least 1.3 x vllm's: 1.20 x")
    assert measured[2].to_dicts()[-1] == {"row": "chats", "target": "vllm", "error": "gone"}


@pytest.mark.parametrize("first", ["llama", "vllm"])
def test_without_a_figure_of_ours_there_is_no_ratio_and_no_verdict(first: str) -> None:
    row = all_rows(25.0)["streams"]
    columns = [column(name, row, 400.0, 0.4) for name in ("llama", "vllm")]
    measured = [Measured(row, sorted(columns, key=lambda one: one.target != first), {"stallfree": "gone"})]
    assert [line.split(":")[0] for line in goal_lines(measured, GOALS)] == ["not measured"]
    assert "x)" not in table(measured, ["stallfree", "llama", "vllm"])


def test_no_row_has_a_prompt_that_an_earlier_one_had() -> None:
    async def on_turn(name: str) -> None:
        pass

    prompts = PromptMaker(FALLBACK_VOCAB_SIZE, 0, 512)
    begun: list[tuple[int, ...]] = []
    for place, row in enumerate(all_rows(20.0).values()):
        first_run = session_of(row, place, on_turn).num_runs
        plan = row.workload.plan(row.num_requests, row.rate)
        begun += [tuple(prompts.token_ids(request, run)[:16]) for run in (first_run, first_run + 1) for request in plan]
    assert len(set(begun)) == len(begun)


def test_the_whole_comparison_over_stand_ins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SERVERS, "stallfree", lambda setting, port: stand_in("stallfree", port))
    monkeypatch.setitem(SERVERS, "vllm", lambda setting, port: stand_in("vllm", port))
    monkeypatch.setitem(SERVERS, "transformers", lambda setting, port: stand_in("transformers", port, "3"))
    monkeypatch.setattr("benchmarks.http.CATCH_UP_S", 0.0)
    names = ["vllm", "stallfree", "llama", "transformers"]
    arguments = ["--environments", str(tmp_path), "--model", str(tmp_path), "--gguf", str(tmp_path / "none.gguf")]
    arguments += [
        "--first-port",
        str(free_ports(len(names))),
        "--servers",
        *names,
        "--rows",
        "streams",
        "--rounds",
        "1",
    ]
    monkeypatch.setattr(sys, "argv", ["benchmarks.http", *arguments, "--json"])
    exit_code = main()
    shown = capsys.readouterr()
    lines = [json.loads(line) for line in shown.out.splitlines()]
    assert [line["target"] for line in lines] == ["stallfree", "vllm", "transformers", "llama"]
    assert lines[0]["medians"]["output_tokens_per_s"] > 0
    assert "shorter than asked for" in lines[2]["error"]
    assert "llama is not set up" in lines[3]["error"]
    assert ("MISSED: 32 streams" in shown.err) == (exit_code == 1)
    assert ("kept: 32 streams" in shown.err) == (exit_code == 0)


def test_nothing_measured_is_said_in_a_line_with_status_1_and_no_table_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    document = tmp_path / "document.md"
    document.write_text(f"{BEGIN}\nold\n{END}\n")
    arguments = ["--environments", str(tmp_path), "--model", str(tmp_path), "--servers", "vllm", "ray-llm"]
    monkeypatch.setattr(sys, "argv", ["benchmarks.http", *arguments, "--write", str(document)])
    assert main() == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines()[-1] == "nothing was measured: no server answered"
    assert "old" in document.read_text()
    row = all_rows(20.0)["streams"]
    assert not Measured(row, [column("vllm", row, 0.0, 1.0, num_failed=32)]).has_figures


@pytest.mark.parametrize("num_answered", [3, 20, 50])
def test_a_server_that_ends_in_its_warm_up_or_turn_is_left_out_and_the_others_are_measured(
    num_answered: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.http.CATCH_UP_S", 0.0)
    row = all_rows(20.0)["streams"]
    ports = free_port(), free_port()
    mortal = stand_in("mortal", ports[1], str(num_answered), program=MORTAL_STAND_IN)
    with (
        RunningServer(stand_in("stallfree", ports[0]), ports[0], tmp_path / "log") as ours,
        RunningServer(mortal, ports[1], tmp_path / "mortal.log") as other,
    ):
        (measured,) = asyncio.run(measure([ours, other], [row], 2))
    assert [column.target for column in measured.columns] == ["stallfree"]
    assert measured.columns[0].num_failed == 0
    assert measured.failures["mortal"].startswith("mortal")


def test_a_server_by_hand_ends_by_itself_or_when_it_is_told_to(tmp_path: Path) -> None:
    arguments = ["--environments", str(tmp_path), "--model", str(tmp_path)]
    command = [sys.executable, "-m", "benchmarks.servers", "vllm", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert "vllm is not set up" in result.stderr
    binaries = tmp_path / "vllm" / "bin"
    binaries.mkdir(parents=True)
    (binaries / "python").write_text(f"#!/bin/sh\nexec {sys.executable} -c '{STAND_IN}' $8\n")
    (binaries / "python").chmod(0o755)
    port = str(free_port())
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for for_s, number in (("0.1", None), ("60", signal.SIGTERM)):
        process = subprocess.Popen(
            [*command, "--port", port, "--for-s", for_s], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        with process.stdout:
            assert process.stdout.readline().startswith(f"http://{HOST}:{port}/v1")
            if number is not None:
                process.send_signal(number)
            assert process.wait(30.0) == 0
