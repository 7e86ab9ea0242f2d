"""`stallfree bench` whole: a tiny model in process, servers on loopback, and command lines that are refused."""

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web

from deployments.bench.chats import ChatsWorkload
from deployments.bench.comparison import COMPARED_CHATS
from deployments.cli.main import main
from tests.fake_completions_server import FakeServer, serving
from tests.tiny_models import save_tiny_model

SMALL = ("--max-model-len", "256", "--num-device-blocks", "200", "--num-threads", "1", "--device", "cpu")


@pytest.fixture(scope="module", autouse=True)
def process_settings() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny-llama"), "llama")


@contextmanager
def served(server: FakeServer) -> Iterator[str]:
    """The server in a thread of its own: the command has an event loop itself."""
    ready, is_over = threading.Event(), asyncio.Event()
    found: dict[str, object] = {}

    async def body() -> None:
        async with serving(server) as url:
            found.update(url=url, loop=asyncio.get_running_loop())
            ready.set()
            await is_over.wait()

    thread = threading.Thread(target=lambda: asyncio.run(body()))
    thread.start()
    try:
        assert ready.wait(30.0)
        yield str(found["url"])
    finally:
        loop = found["loop"]
        assert isinstance(loop, asyncio.AbstractEventLoop)
        loop.call_soon_threadsafe(is_over.set)
        thread.join(30.0)


def bench(*arguments: str) -> int:
    return main(["bench", *arguments])


def test_a_real_engine_in_process_is_measured_with_json_and_plots(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix, report = tmp_path / "plot", tmp_path / "report.json"
    arguments = ("--mix", "chat:3@8-16/6,long:1@100/4", "--rate", "20,40", "--num-requests", "12")
    outputs = ("--json", str(report), "--plot", str(prefix))
    engine = ("--in-process", "--model", str(model_folder), *SMALL)
    assert bench(*engine, *arguments, "--slo-itl-ms", "1000x", "--slo-ttft-ms", "60000", *outputs) == 0
    shown = capsys.readouterr().out
    assert "goodput" in shown
    assert "a lone request" in shown
    found = json.loads(report.read_text())
    assert [run["offered_rate"] for run in found["runs"]] == pytest.approx([20.0, 40.0])
    for run in found["runs"]:
        assert (run["num_complete"], run["num_failed"], run["num_good"]) == (12, 0, 12)
        assert run["ttft_ms"]["count"] == 12
        assert run["itl_ms"]["count"] == 9 * 5 + 3 * 3
        assert set(run["by_kind"]) == {"chat", "long"}
        assert run["output_tokens_per_s"] * run["duration_s"] == pytest.approx(9 * 6 + 3 * 4)
    assert found["slo"]["itl_ms"] == pytest.approx(1000 * found["slo"]["solo_itl_ms"])
    assert (tmp_path / "plot-itl.png").exists()
    assert (tmp_path / "plot-rate.png").exists()


def test_the_capacity_of_a_real_engine_is_found_from_a_trace(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    rows = [f"{0.1 * number},{40 + number},9" for number in range(8)]
    trace.write_text("\n".join(["arrival_s,input_tokens,output_tokens", *rows]))
    load = ("--trace", str(trace), "--scale-input", "0.25", "--fix-output", "4")
    search = ("--capacity", "--slo-ttft-ms", "60000", "--max-search-s", "2", "--json", "-")
    assert bench("--in-process", "--model", str(model_folder), *SMALL, *load, *search) == 0
    found = json.loads(capsys.readouterr().out)
    (capacity,) = found["capacity"].values()
    assert capacity["trials"][0] == {"rate": pytest.approx(10.0), "miss": None}
    assert capacity["rate"] >= 10.0
    assert found["runs"][0]["input_tokens_per_s"] * found["runs"][0]["duration_s"] == pytest.approx(
        sum(max(1, round((40 + number) * 0.25)) for number in range(8))
    )


def test_a_request_that_the_engine_refuses_is_counted(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = ("--mix", "fits:1@8/4,never:1@300/4", "--rate", "inf", "--num-requests", "4", "--warm-up", "0")
    assert bench("--in-process", "--model", str(model_folder), *SMALL, *load, "--json", "-") == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert (run["num_complete"], run["num_failed"]) == (2, 2)
    assert "256" in next(iter(run["errors"]))


def test_a_server_is_measured_over_http(capsys: pytest.CaptureFixture[str]) -> None:
    with served(FakeServer()) as url:
        assert bench("--url", f"{url}/v1/", "--rate", "50", "--num-requests", "10", "--output-len", "5") == 0
    shown = capsys.readouterr()
    assert "complete 10, failed 0" in shown.out
    assert "send lateness" in shown.out


def test_servers_are_compared_in_turn(capsys: pytest.CaptureFixture[str]) -> None:
    with served(FakeServer(gap_s=0.002)) as fast, served(FakeServer(gap_s=0.1)) as slow:
        load = ("--rate", "50", "--num-requests", "6", "--output-len", "4", "--rounds", "2", "--json", "-")
        assert bench("--compare", fast, slow, *load) == 0
    first, second = json.loads(capsys.readouterr().out)["comparison"]
    assert first["ratios_to_first"]["itl_p50_s"] == pytest.approx(1.0)
    assert second["ratios_to_first"]["itl_p50_s"] > 2.0
    assert second["rounds"] == 2


def test_servers_have_names_prompts_that_all_take_and_fields_of_their_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    one, other = FakeServer(), FakeServer(models=["its-own"], takes_token_ids=False)
    with served(one) as first, served(other) as second:
        load = ("--rate", "50", "--num-requests", "3", "--output-len", "4", "--rounds", "1", "--json", "-")
        body = ("--body", 'two={"repeat_penalty": 1.0}')
        assert bench("--compare", f"one={first}", f"two={second}", *load, *body) == 0
    shown = capsys.readouterr()
    columns = json.loads(shown.out)["comparison"]
    assert [column["target"] for column in columns] == ["one", "two"]
    assert [column["medians"]["prompt_tokens"] for column in columns] == [128.0, 128.0]
    assert "take no token ids: two" in shown.err
    assert one.bodies[-1]["prompt"] == other.bodies[-1]["prompt"]
    assert (one.bodies[-1]["model"], other.bodies[-1]["model"]) == ("fake", "its-own")
    assert ("repeat_penalty" in one.bodies[-1], "repeat_penalty" in other.bodies[-1]) == (False, True)


def test_the_scenario_of_chats_is_compared(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.cli.bench_checks.LONG_EVERY_S", 0.2)
    quick = partial(ChatsWorkload, long_every_s=0.2)
    monkeypatch.setattr("deployments.cli.bench_options.ChatsWorkload", quick)
    with served(FakeServer(gap_s=0.005)) as url:
        scenario = ("--scenario", "chats", "--duration-s", "0.6", "--rounds", "1", "--warm-up", "1", "--json", "-")
        scenario += ("--output-len", "20")
        assert bench("--compare", f"a={url}", f"b={url}", *scenario) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["comparison"][0]["medians"]) == set(COMPARED_CHATS)
    for run in found["runs"]:
        assert run["chats"]["num_long"] == 2
        assert run["chats"]["itl_ms"]["count"] > 40  # 8 x 20 and more on an idle machine
        assert run["num_failed"] == 0


@pytest.mark.parametrize("arguments", [("--rounds", "1"), ("--warm-up", "0", "--rounds", "1")])
def test_a_server_that_ends_its_answers_early_ends_a_comparison_by_name(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with served(FakeServer()) as good, served(FakeServer(stop_after=3)) as early:
        load = ("--rate", "50", "--num-requests", "3", "--output-len", "4")
        assert bench("--compare", f"good={good}", f"early={early}", *load, *arguments) == 1
    assert "error: early: " in capsys.readouterr().err


def test_a_server_that_is_not_there_ends_a_comparison_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with served(FakeServer()) as good:
        assert bench("--compare", f"good={good}", "gone=http://127.0.0.1:9") == 1
    assert "stallfree: error: gone: Client" in capsys.readouterr().err


def test_a_server_may_be_compared_with_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with served(FakeServer()) as url:
        load = ("--rate", "50", "--num-requests", "3", "--output-len", "4", "--rounds", "1", "--json", "-")
        assert bench("--compare", url, f"{url}/v1", *load) == 0
    found = json.loads(capsys.readouterr().out)
    assert [column["target"] for column in found["comparison"]] == [f"{url} #1", f"{url}/v1 #2"]


def test_a_server_that_is_not_there_ends_the_command_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--url", "http://127.0.0.1:9") == 1
    assert "stallfree: error: http://127.0.0.1:9: Client" in capsys.readouterr().err


QUICK = ("--rate", "50", "--num-requests", "3", "--output-len", "4", "--warm-up", "0")


@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions"])
def test_a_server_that_never_answers_ends_the_command_in_one_line(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(FakeServer(silent_at=path)) as url:
        assert bench("--url", url, "--timeout-s", "0.3") == 1
    error = capsys.readouterr().err
    assert error.startswith(f"stallfree: error: {url}: no answer to ")
    assert error.endswith("within 0.3 s\n")
    assert error.count("\n") == 1


class BrokenAfterProbe(FakeServer):
    """Its probe goes well; what comes after breaks, or after `num_good` requests."""

    num_good = 1

    async def _stream(self, response: web.StreamResponse, body: dict[str, Any]) -> None:
        self.break_after = 2 if len(self.bodies) > self.num_good else None
        await super()._stream(response, body)


@pytest.mark.parametrize("load", [QUICK, (*QUICK, "--capacity", "--slo-ttft-ms", "9000", "--max-search-s", "0.1")])
def test_a_run_in_which_every_request_failed_ends_with_1_and_says_why(
    load: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with served(BrokenAfterProbe()) as url:
        assert bench("--url", url, *load) == 1
    shown = capsys.readouterr()
    assert "error x " in shown.out
    assert f"stallfree: error: {url}: no answer was complete: the stream ended without [DONE]\n" in shown.err


def test_the_table_of_several_rates_says_why_requests_failed(capsys: pytest.CaptureFixture[str]) -> None:
    server = BrokenAfterProbe()
    server.num_good = 4  # the probe and the first run
    with served(server) as url:
        assert bench("--url", url, *QUICK, "--rate", "50,80") == 0
    assert f"{url}, 80 requests/s: error x 3: the stream ended without [DONE]" in capsys.readouterr().out


@pytest.mark.parametrize("rates", ["50", "50,80"])
def test_text_of_another_length_than_asked_for_is_said_beside_the_figures(
    rates: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(FakeServer(tokens_per_word=2)) as url:
        assert bench("--url", url, *QUICK, "--input-len", "16", "--rate", rates, "--text-prompts") == 0
    shown = capsys.readouterr().out
    assert f"{url}: prompts are text, a common word for each token\n" in shown
    assert f"prompts of {url}: 32.0 tokens on average as it counts them, 16.0 asked for" in shown


def test_a_server_that_counts_no_tokens_of_text_is_said_to(capsys: pytest.CaptureFixture[str]) -> None:
    server = FakeServer(takes_token_ids=False, unknown_fields=frozenset({"stream_options"}))
    with served(server) as url:
        assert bench("--url", url, *QUICK, "--json", "-") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["notes"] == [
        f"{url}: prompts are text, a common word for each token; it does not say how many tokens that is"
    ]


def test_prompts_of_the_length_asked_for_need_no_word(capsys: pytest.CaptureFixture[str]) -> None:
    with served(FakeServer()) as url:
        assert bench("--url", url, *QUICK) == 0
    assert "prompts" not in capsys.readouterr().out


def test_token_ids_that_the_model_has_not_are_refused(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = ("--in-process", "--model", str(model_folder), *SMALL)
    assert bench(*engine, "--vocab-size", "100000000") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("stallfree: error: --vocab-size: the model has ")
    assert error.endswith(" token ids, got 100000000")


@pytest.mark.parametrize("load", [("--rate", "2"), ("--capacity", "--slo-ttft-ms", "500")])
def test_a_trace_of_one_moment_cannot_be_stretched_to_a_rate(
    load: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n1,40,9\n1,50,9\n")
    assert bench("--url", "http://x", "--trace", str(trace), *load) == 2
    assert "--trace: all requests arrive at the same moment" in capsys.readouterr().err
    assert bench("--url", "http://x", "--trace", str(trace), "--scale-input", "1e300") == 2
    assert "--scale-input: makes a prompt of more than" in capsys.readouterr().err


def test_files_that_cannot_be_written_are_refused_before_anything_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = FakeServer()
    (tmp_path / "plot-itl.png").mkdir()
    with served(server) as url:
        for option, place, reason in (
            ("--json", tmp_path / "none" / "a.json", f"there is no folder {tmp_path / 'none'}"),
            ("--json", tmp_path, "it is a folder"),
            ("--plot", tmp_path / "none" / "a", f"there is no folder {tmp_path / 'none'}"),
            ("--plot", tmp_path / "plot", "it is a folder"),
        ):
            assert bench("--url", url, option, str(place)) == 2
            error = capsys.readouterr().err
            assert error.startswith(f"stallfree: error: {option}: cannot write ")
            assert error.endswith(f": {reason}\n")
    assert server.bodies == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "one of the arguments"),
        (("--url", "ftp://x"), "--url: must read http://HOST:PORT"),
        (("--url", "x"), "--url: must read http://HOST:PORT"),
        (("--url", "http://"), "--url: must read http://HOST:PORT"),
        (("--url", "http://x:99999"), "--url: must read http://HOST:PORT"),
        (("--compare", "a=http://x", "b=http://y:0"), "--compare: must read"),
        (("--in-process", "--api-key", "k"), "--api-key: is for servers"),
        (("--in-process", "--text-prompts"), "--text-prompts: is for servers"),
        (("--in-process", "--served-model-name", "m"), "--served-model-name: is for servers"),
        (("--url", "http://x", "--text-prompts", "--vocab-size", "99"), "--vocab-size: of token ids"),
        (("--url", "http://x", "--rounds", "3"), "--rounds: only with --compare"),
        (("--compare", "http://x", "--rounds", "3", "--capacity", "--slo-itl-ms", "5"), "--rounds: only with"),
        (("--url", "http://x", "--precision", "0.1"), "--precision: only with --capacity"),
        (("--url", "http://x", "--trial-s", "5"), "--trial-s: only with --capacity"),
        (("--url", "http://x", "--max-search-s", "5"), "--max-search-s: only with --capacity"),
        (("--url", "http://x", "--precision", "2"), "--precision: must be above 0 and below 1"),
        (("--url", "http://x", "--precision", "0"), "--precision: must be a number above 0"),
        (("--url", "http://x", "--scenario", "chats", "--burstiness", "2"), "--burstiness: --scenario says"),
        (("--url", "http://x", "--trace", "x.csv", "--burstiness", "2"), "--burstiness: --trace says"),
        (("--url", "http://x", "--trace", "x.csv", "--rate", "1", "--stretch", "2"), "--stretch: a trace is stretched"),
        (("--url", "http://x", "--input-len", "9" * 20), "--input-len: must be at most"),
        (("--url", "http://x", "--output-len", f"1-{'9' * 20}"), "--output-len: must be at most"),
        (("--url", "http://x", "--mix", f"a:1@1/{'9' * 20}"), "--mix: must be at most"),
        (("--url", "http://x", "--fix-output", "9" * 20), "--fix-output: must be at most"),
        (("--url", "http://x", "--scale-input", "inf"), "--scale-input: must be a finite number"),
        (("--url", "http://x", "--trial-s", "inf"), "--trial-s: must be a finite number"),
        (("--url", "http://x", "--slo-itl-ms", "infx"), "--slo-itl-ms: must be a finite number"),
        (("--url", "http://x", "--slo-itl-ms", "x"), "--slo-itl-ms: must be a number above 0, got 'x'"),
        (("--url", "http://x", "--in-process"), "not allowed with"),
        (("--url", "http://x", "--max-num-seqs", "3"), "--max-num-seqs: is an engine option"),
        (("--url", "http://x", "--capacity"), "--capacity: needs --slo"),
        (("--url", "http://x", "--capacity", "--slo-itl-ms", "5", "--rate", "1,2"), "--rate: with --capacity"),
        (("--url", "http://x", "--capacity", "--slo-itl-ms", "5", "--rate", "inf"), "--rate: with --capacity"),
        (("--compare", "http://x", "--rate", "1,2"), "--rate: --compare takes one"),
        (("--url", "http://x", "--mix", "a:1@1/1", "--input-len", "3"), "--input-len: --mix says"),
        (("--url", "http://x", "--fix-output", "3"), "--fix-output: only with --trace"),
        (("--url", "http://x", "--trace", "/nowhere/trace"), "--trace: cannot read"),
        (("--url", "http://x", "--mix", "a:0@1/1"), "--mix: the share must be above 0"),
        (("--url", "http://x", "--rate", "0"), "--rate: must be a number above 0"),
        (("--url", "http://x", "--rate", "nan"), "--rate: must be a number above 0"),
        (("--url", "http://x", "--num-requests", "0"), "--num-requests: must be at least 1"),
        (("--url", "http://x", "--slo-itl-ms", "x"), "--slo-itl-ms: must be a number above 0"),
        (("--url", "http://x", "--scenario", "chats", "--rate", "3"), "--rate: --scenario says what is sent"),
        (("--url", "http://x", "--scenario", "chats", "--mix", "a:1@1/1"), "not allowed with"),
        (("--url", "http://x", "--scenario", "chats", "--duration-s", "9"), "--duration-s: must be at least 10"),
        (("--url", "http://x", "--scenario", "chats", "--capacity", "--slo-itl-ms", "5"), "--scenario: has no rate"),
        (("--url", "http://x", "--duration-s", "30"), "--duration-s: only with --scenario"),
        (("--compare", "ours=localhost:8000"), "--compare: must read"),
        (("--compare", "a=http://x", "a=http://y"), "--compare: a name occurs twice"),
        (("--compare", "a=http://x", "--body", "b={}"), "--body: --compare has no server b"),
        (("--compare", "a=http://x", "--body", "a=[]"), "--body: must be a JSON object"),
        (("--compare", "a=http://x", "--body", '{"max_tokens": 3}'), "--body: max_tokens is what the benchmark sets"),
        (("--in-process", "--body", "{}"), "--body: is for servers"),
        (("--url", "http://x", "--warm-up", "-1"), "--warm-up: must not be negative"),
        (("--in-process", "--block-size", "0"), "--block-size: must be"),
    ],
)
def test_what_cannot_be_done_as_asked_ends_with_2_and_names_the_option(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("stallfree: error: ")
    assert message in error
    assert error.count("\n") == 1


def test_help_and_parsing_load_neither_torch_nor_matplotlib_nor_an_http_client() -> None:
    program = (
        "import sys\nfrom deployments.cli.main import main\ncode = main(['bench', '--help'])\n"
        "print(sorted({'torch', 'ray', 'matplotlib', 'aiohttp', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert result.stderr.strip() == "[]"
    assert "--slo-itl-ms" in result.stdout
