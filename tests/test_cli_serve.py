"""`stallfree serve` as a person runs it: a process that starts, says one line, serves, and ends without remains."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from deployments.cli.main import main
from deployments.config import AppArgs
from tests.server_process import alive, free_port
from tests.tiny_models import save_tiny_model
from tests.tiny_tokenizer import save_tiny_tokenizer

pytestmark = pytest.mark.ray

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_tokenizer(save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", "llama"))


@contextlib.contextmanager
def started(*arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """The command as a child process in a group of its own; whatever it left behind is ended with the test."""
    command = [sys.executable, "-m", "deployments.cli.main", "serve", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0)
    children: list[psutil.Process] = []
    try:
        yield process
    finally:
        if process.poll() is None:
            children = psutil.Process(process.pid).children(recursive=True)
            process.kill()
        process.communicate()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def wait_for(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s"
        time.sleep(0.05)


def metric(url: str, name: str) -> float:
    text = httpx.get(url.replace("/v1", "/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith(name + "{")]
    assert lines
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def check_several_answers(url: str, body: dict[str, Any]) -> None:
    def ask(**fields: Any) -> dict[str, Any]:
        response = httpx.post(f"{url}/completions", json={**body, "prompt": "x" * 40, **fields}, timeout=60)
        assert response.status_code == 200, response.text
        return response.json()

    sampled = ask(n=3, seed=5)
    texts = [choice["text"] for choice in sampled["choices"]]
    assert [choice["index"] for choice in sampled["choices"]] == [0, 1, 2]
    assert len(set(texts)) == 3
    again = ask(n=2, seed=5)
    assert [choice["text"] for choice in again["choices"]] == texts[:2]
    assert again["usage"]["prompt_tokens"] == 40
    assert again["usage"]["completion_tokens"] == 14
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}
    assert ask(n=1, best_of=3, seed=5)["choices"][0]["text"] in texts
    beams = ask(use_beam_search=True, n=2, beam_width=4)
    assert len({choice["text"] for choice in beams["choices"]}) == 2
    assert ask(cache_salt="mine")["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    wait_for(lambda: metric(url, "stallfree_prefix_cache_hits_total") > 0, 5.0)


@pytest.mark.slow
def test_it_says_one_line_answers_and_leaves_no_process(model_folder: Path):
    port = free_port()
    options = ["--model", str(model_folder), "--port", str(port), "--metrics-port", "0", "--num-threads", "1"]
    with started(*options, "--served-model-name", "mine", "--drain-timeout-s", "2") as process:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{port}/v1"
        assert process.stdout.readline() == f"Serving mine at {url}\n"
        body = {"model": "mine", "prompt": "Hello", "max_tokens": 7, "ignore_eos": True}
        answer = httpx.post(f"{url}/completions", json=body, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 7

        check_several_answers(url, body)
        endless = {**body, "max_tokens": 100, "stream": True}
        with httpx.stream("POST", f"{url}/completions", json=endless, timeout=60) as response:
            chunks = response.iter_text()
            next(chunks)
        wait_for(lambda: metric(url, "stallfree_kv_blocks_used") == 0, 2.0)
        assert metric(url, "stallfree_num_requests_running") == 0

        family = psutil.Process(process.pid).children(recursive=True)
        assert any("raylet" in child.name() for child in family)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=STOP_TIMEOUT_S)
        assert process.returncode == 0, err
        assert out == ""
        assert "Traceback" not in err
        assert alive(family) == []


@pytest.mark.slow
def test_a_signal_to_its_whole_group_in_mid_stream_ends_it_at_once_and_leaves_no_process(model_folder: Path):
    port = free_port()
    options = ["--model", str(model_folder), "--port", str(port), "--metrics-port", "0", "--num-threads", "1"]
    with started(*options, "--served-model-name", "mine") as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("Serving mine")
        family = psutil.Process(process.pid).children(recursive=True)
        body = {"model": "mine", "prompt": "Hello", "max_tokens": 100, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60) as response:
            next(response.iter_raw())
            began_s = time.monotonic()
            os.killpg(process.pid, signal.SIGTERM)
            out, err = process.communicate(timeout=STOP_TIMEOUT_S)
            ended_s = time.monotonic() - began_s
        assert process.returncode == 1, err
        assert out == ""
        last_line = err.splitlines()[-1]
        assert last_line.startswith("stallfree: error: Ray has ended")
        assert last_line.endswith(f"signal the main process alone, {process.pid}")
        assert "Traceback" not in err
        # Ray's own processes would go on for ten seconds.
        assert ended_s < 5.0
        wait_for(lambda: alive(family) == [], 1.0)


def test_ctrl_c_while_it_starts_leaves_no_process(model_folder: Path):
    options = ["--model", str(model_folder), "--port", str(free_port()), "--metrics-port", "0"]
    with started(*options) as process:
        family: list[psutil.Process] = []

        def is_starting() -> bool:
            family[:] = psutil.Process(process.pid).children(recursive=True)
            return any("raylet" in child.name() for child in family)

        wait_for(is_starting, START_TIMEOUT_S)
        # As a terminal does it.
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=STOP_TIMEOUT_S)
        assert process.returncode == 130, err
        assert out == ""
        assert "Traceback" not in err
        wait_for(lambda: alive(family) == [], 5.0)


def test_help_shows_the_defaults_that_the_options_have(capsys: pytest.CaptureFixture[str]):
    assert main(["serve", "--help"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    shown = dict(re.findall(r"--([a-z-]+) [NSP] (?:(?!--).)*?\(default: (-?[0-9.]+)\)", words))
    defaults = {
        name.replace("_", "-"): field.default for name, field in AppArgs.model_fields.items()
    }
    compared = {name for name in shown if isinstance(defaults.get(name), int | float)}
    assert len(compared) >= 15
    assert {name: float(shown[name]) for name in compared} == {name: defaults[name] for name in compared}


def test_a_taken_port_is_refused_before_ray_starts(model_folder: Path):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        ended = subprocess.run(
            [sys.executable, "-m", "deployments.cli.main", "serve", "--model", str(model_folder), "--port", str(port)],
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT_S,
            env=dict(os.environ),
        )
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1] == f"stallfree: error: --port: {port} on 127.0.0.1 is taken by another process"
    assert ended.stdout == ""


def test_a_length_over_the_models_is_refused_by_name(model_folder: Path, capsys: pytest.CaptureFixture[str]):
    from deployments.cli.main import main

    assert main(["serve", "--model", str(model_folder), "--max-model-len", "1000000"]) == 2
    assert "--max-model-len: 1000000 is over the model's" in capsys.readouterr().err


def test_a_pool_that_cannot_hold_one_sequence_is_refused_by_name(
    model_folder: Path, capsys: pytest.CaptureFixture[str]
):
    from deployments.cli.main import main

    assert main(["serve", "--model", str(model_folder), "--num-device-blocks", "2", "--max-model-len", "64"]) == 2
    assert "--num-device-blocks: 2 blocks" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--tensor-parallel-size=2", "--enable-lora", "--quantization=x", "--lora-modules"])
@pytest.mark.parametrize("command", [("serve",), ("generate",), ("bench", "--in-process")])
def test_what_is_not_there_yet_is_refused_by_its_option(
    command: tuple[str, ...], option: str, capsys: pytest.CaptureFixture[str]
):
    assert main([*command, option]) == 2
    assert capsys.readouterr().err == f"stallfree: error: {option.partition('=')[0]}: is not available yet\n"
