"""OpenAI's client for Node (`openai` from npm) against the running server: chats, streams, tools, leaving, errors."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.debian_tools import program
from tests.end_to_end.configuration import MODEL
from tests.end_to_end.scrape import Growth, settled
from tests.server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.model]

SOURCE = Path(__file__).parents[1] / "node"
INSTALL_TIMEOUT_S = 120
CASE_TIMEOUT_S = 60

Ask = Callable[[str], Any]


@pytest.fixture(scope="module")
def ask(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """Does one case of the script and returns what it printed. The client is installed outside of the repository."""
    node, npm = program("node"), program("npm")
    folder = shutil.copytree(SOURCE, tmp_path_factory.mktemp("node") / "client")
    install = [npm, "install", "--no-package-lock", "--ignore-scripts", "--prefer-offline", "--no-audit", "--no-fund"]
    installed = subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
    assert installed.returncode == 0, installed.stderr

    def ask_one(case: str) -> Any:
        command = [node, "openai_client.mjs", f"{server.url}/v1", MODEL, case]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=CASE_TIMEOUT_S)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return ask_one


def test_a_streamed_chat_is_the_whole_one(ask: Ask) -> None:
    whole, streamed = ask("chat"), ask("stream")
    assert "Paris" in whole["text"]
    assert streamed.pop("numChunks") > 4
    for seen in (whole, streamed):  # what the cache gave is not the same twice
        del seen["usage"]["prompt_tokens_details"]
    assert streamed == whole
    assert whole["usage"]["total_tokens"] == whole["usage"]["prompt_tokens"] + whole["usage"]["completion_tokens"]


def test_a_forced_call_goes_out_whole_and_streamed_and_its_result_comes_back(ask: Ask) -> None:
    seen = ask("tools")
    assert seen["finishReasons"][:2] == ["tool_calls", "tool_calls"]
    assert seen["finishReasons"][2] in ("stop", "length")
    whole, streamed = seen["calls"]
    assert whole == streamed
    name, arguments = whole
    assert (name, arguments.keys()) == ("get_weather", {"city", "unit"})
    assert seen["numArgumentDeltas"] > 2
    assert seen["text"]


def test_a_stream_that_the_client_aborts_ends_at_the_server(server: ServerProcess, ask: Ask) -> None:
    before = settled(server)
    assert 4 <= ask("abort")["numChunks"] < 100
    growth = Growth(before, settled(server))  # settled: nothing is held any more
    assert growth("stallfree_requests_total", finish_reason="abort") == 1
    assert growth("stallfree_requests_total") == 1
    assert growth("stallfree_generation_tokens_total") < 500


def test_an_error_is_the_clients_own_kind_and_names_the_field(ask: Ask) -> None:
    error = ask("error")
    assert (error["kind"], error["status"], error["param"]) == ("BadRequestError", 400, "max_tokens")
    assert error["requestId"]
