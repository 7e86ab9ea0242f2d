import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deployments.cli.main import main
from deployments.cli.options import OneLineParser, add_engine_options, engine_config_from, given_engine_options
from deployments.cli.progress import FILE_PERIOD_S, ProgressLine
from tests.tiny_models import save_tiny_model
from tests.tiny_tokenizer import save_tiny_tokenizer
from worker.config import EngineConfig

SMALL = ("--max-model-len", "256", "--num-device-blocks", "40", "--num-threads", "1", "--device", "cpu")
GREEDY = ("--temperature", "0", "--max-tokens", "8", "--ignore-eos")


@pytest.fixture(scope="module", autouse=True)
def process_settings() -> Iterator[None]:
    """`--num-threads` and the libraries' verbosity are the whole process's, so they are put back."""
    from transformers.utils import logging

    num_threads, verbosity = torch.get_num_threads(), logging.get_verbosity()
    yield
    torch.set_num_threads(num_threads)
    logging.set_verbosity(verbosity)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_tokenizer(save_tiny_model(tmp_path_factory.mktemp("tiny-llama"), "llama"))


def generate(*arguments: str) -> int:
    return main(["generate", *arguments])


def json_lines(output: str) -> list[dict]:
    return [json.loads(line) for line in output.splitlines()]


# --- answers


def test_completions_alone_are_printed_in_the_order_of_the_prompts(
    model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--model", str(model_folder), *SMALL, *GREEDY, "--prompt", "abc", "--prompt", "hello")
    assert generate(*options, "--json") == 0
    first, second, _ = json_lines(capsys.readouterr().out)
    assert generate(*options) == 0
    assert capsys.readouterr().out == f"{first['text']}\n{second['text']}\n"


def test_json_has_one_object_a_prompt_and_last_the_stats(
    model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--model", str(model_folder), *SMALL, *GREEDY, "--prompt", "abc", "--prompt", "日本")
    assert generate(*options, "--json") == 0
    *answers, last = json_lines(capsys.readouterr().out)
    assert [answer["prompt"] for answer in answers] == ["abc", "日本"]
    for answer in answers:
        assert list(answer) == ["prompt", "index", "text", "token_ids", "finish_reason"]
        assert len(answer["token_ids"]) == 8
        assert answer["finish_reason"] == "length"
    assert last == {
        "stats": {
            "steps": 8,
            "prefill_chunks": 2,
            "preemptions": {"recompute": 0, "swap": 0},
            "swapped_blocks": {"out": 0, "in": 0},
            "discarded_tokens": 0,
            "prefix_cache": {"queried_blocks": 0, "hit_blocks": 0},
        }
    }


def test_several_answers_are_a_line_each_with_their_index(
    model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--model", str(model_folder), *SMALL, "--max-tokens", "8", "--ignore-eos", "--seed", "3")
    assert generate(*options, "--n", "2", "--prompt", "abc", "--prompt", "hello", "--json") == 0
    *answers, _ = json_lines(capsys.readouterr().out)
    assert [(answer["prompt"], answer["index"]) for answer in answers] == [
        ("abc", 0), ("abc", 1), ("hello", 0), ("hello", 1),
    ]  # fmt: skip
    assert generate(*options, "--n", "2", "--prompt", "abc") == 0
    assert capsys.readouterr().out == f"{answers[0]['text']}\n{answers[1]['text']}\n"


def test_a_beam_search_prints_its_best_answers(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--model", str(model_folder), *SMALL, "--max-tokens", "8", "--ignore-eos", "--prompt", "abc", "--json")
    beams = ("--beam-width", "4", "--length-penalty", "0.5", "--early-stopping", "never")
    assert generate(*options, *beams, "--n", "2") == 0
    *answers, _ = json_lines(capsys.readouterr().out)
    assert [answer["index"] for answer in answers] == [0, 1]
    assert answers[0]["token_ids"] != answers[1]["token_ids"]


def test_the_seed_fixes_the_answer(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = []
    for seed in ("7", "7", "8"):
        options = ("--model", str(model_folder), *SMALL, "--max-tokens", "20", "--ignore-eos", "--json")
        assert generate(*options, "--prompt", "abc", "--seed", seed) == 0
        answers.append(json_lines(capsys.readouterr().out)[0]["token_ids"])
    assert answers[0] == answers[1] != answers[2]


def test_chat_answers_the_chat_template_and_shows_the_message_as_prompt(
    model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--model", str(model_folder), *SMALL, *GREEDY, "--json")
    assert generate(*options, "--chat", "--prompt", "hi") == 0
    assert generate(*options, "--prompt", "<bos>user:hi<eos><bos>assistant:") == 0
    chat, _, plain, _ = json_lines(capsys.readouterr().out)
    assert chat["prompt"] == "hi"
    assert chat["token_ids"] == plain["token_ids"]


def test_a_prompt_file_is_one_prompt_and_a_jsonl_file_one_a_line(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, lines = tmp_path / "prompt.txt", tmp_path / "prompts.jsonl"
    text.write_text("two\nlines\n")
    lines.write_text('"two\\nlines"\n\n{"prompt": "second", "id": 4}\n')
    options = ("--model", str(model_folder), *SMALL, *GREEDY, "--json")
    assert generate(*options, "--prompt-file", str(text)) == 0
    assert generate(*options, "--prompt-file", str(lines)) == 0
    of_text, _, first, second, _ = json_lines(capsys.readouterr().out)
    assert of_text["prompt"] == "two\nlines"
    assert (first, second["prompt"]) == (of_text, "second")


def test_standard_input_is_the_prompt_and_standard_output_holds_the_answer_alone(model_folder: Path) -> None:
    options = ["--model", str(model_folder), *SMALL, *GREEDY]
    result = run_cli("generate", *options, "--json", stdin="from stdin\n")
    assert (result.returncode, json_lines(result.stdout)[0]["prompt"]) == (0, "from stdin")
    assert "loading" in result.stderr
    assert "Warning" not in result.stderr


# --- refusals


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--max-num-seqs", "0"], "--max-num-seqs: must be at least 1, got 0"),
        (["--max-num-seqs", "many"], "--max-num-seqs: must be a whole number, got 'many'"),
        (["--block-size", "-16"], "--block-size: must be at least 1, got -16"),
        (["--max-model-len", "0"], "--max-model-len: must be at least 1, got 0"),
        (["--num-threads", "0"], "--num-threads: must be at least 1, got 0"),
        (["--max-num-batched-tokens", "8", "--max-num-seqs", "9"], "--max-num-batched-tokens: 8 is below"),
        (["--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization: must be above 0"),
        (["--kv-cache-memory", "1 lot"], "--kv-cache-memory: unknown unit"),
        (["--kv-cache-memory", "1GiB", "--num-device-blocks", "9"], "--kv-cache-memory: gives the pool's size"),
        (["--dtype", "int3"], "--dtype: invalid choice: 'int3'"),
        (["--scheduler-policy", "magic"], "--scheduler-policy: invalid choice: 'magic'"),
        (["--max-tokens", "-1"], "--max-tokens: must be at least 1, got -1"),
        (["--temperature", "-1"], "--temperature: must be from 0 to 2, got -1.0"),
        (["--temperature", "nan"], "--temperature: must be from 0 to 2, got nan"),
        (["--top-p", "1.01"], "--top-p: must be from 0 to 1, got 1.01"),
        (["--top-k", "-5"], "--top-k: must be at least 0, got -5"),
        (["--min-p", "7"], "--min-p: must be from 0 to 1, got 7.0"),
        (["--max-tok", "5"], "unrecognized arguments: --max-tok 5"),
        (["--prompt-file", "x"], "--prompt-file: not allowed with argument --prompt"),
    ],
)
def test_wrong_options_are_refused_in_one_line_with_their_name(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate("--prompt", "x", *arguments) == 2
    assert_one_error_line(capsys, line)


def test_a_missing_model_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = str(tmp_path / "nothing")
    assert generate("--prompt", "x", "--model", missing) == 2
    assert_one_error_line(capsys, f"--model: there is no folder {missing}")


def test_unreadable_prompt_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing, binary, lines, empty = (tmp_path / name for name in ("none", "binary", "bad.jsonl", "empty.jsonl"))
    binary.write_bytes(b"\xff\xfe")
    lines.write_text('"fine"\n17\n')
    empty.write_text("\n")
    for path, line in (
        (missing, f"--prompt-file: {missing}: No such file or directory"),
        (tmp_path, f"--prompt-file: {tmp_path}: Is a directory"),
        (binary, "--prompt-file: is not UTF-8 text"),
        (lines, "--prompt-file: line 2 is neither"),
        (empty, f"--prompt-file: {empty} holds no prompt"),
    ):
        assert generate("--prompt-file", str(path)) == 2
        assert_one_error_line(capsys, line)


def test_what_the_model_cannot_hold_is_refused_in_one_line(
    model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ("--model", str(model_folder), "--prompt")
    for arguments, line in (
        ((*model, "x", "--max-model-len", "9999"), "--max-model-len: 9999 is over the model's 2048"),
        ((*model, "x", *SMALL, "--num-device-blocks", "5"), "--num-device-blocks: 5 blocks of 16 cannot hold"),
        ((*model, "x" * 300, *SMALL), "prompt 1 of 1: the prompt has 300 tokens; at most 255"),
        ((*model, "", *SMALL), "prompt 1 of 1: the prompt is empty"),
    ):
        assert generate(*arguments) == 2
        errors = capsys.readouterr().err.splitlines()
        assert errors[-1].startswith(f"stallfree: error: {line}")


def test_a_model_without_a_chat_template_cannot_chat(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_tiny_tokenizer(save_tiny_model(tmp_path, "llama"))
    (folder / "chat_template.jinja").unlink()
    assert generate("--model", str(folder), *SMALL, "--chat", "--prompt", "hi") == 2
    assert "stallfree: error: --chat: the model has no chat template" in capsys.readouterr().err


def test_an_unknown_command_and_none_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explode"]) == 2
    assert_one_error_line(capsys, "COMMAND: invalid choice: 'explode'")
    assert main([]) == 2
    assert_one_error_line(capsys, "the following arguments are required: COMMAND")


# --- options


def engine_parser() -> OneLineParser:
    parser = OneLineParser()
    add_engine_options(parser)
    return parser


def test_options_not_given_leave_no_trace_and_fall_to_the_engines_defaults() -> None:
    args = engine_parser().parse_args([])
    assert given_engine_options(args) == {}
    assert engine_config_from(args) == EngineConfig()


def test_every_option_reaches_the_field_of_its_name() -> None:
    values = {
        "model": "folder",
        "revision": "main",
        "dtype": "float32",
        "device": "cpu",
        "max_model_len": 1000,
        "max_num_batched_tokens": 500,
        "max_num_seqs": 20,
        "block_size": 32,
        "num_host_blocks": 70,
        "kv_cache_memory": 3 * 2**20,
        "gpu_memory_utilization": 0.5,
        "scheduler_policy": "default",
        "preemption_mode": "swap",
        "queue_policy": "fair",
        "priority_aging_s": 5.0,
        "prefix_cache_secret": "of ours",
        "chunk_alignment": 64,
        "max_num_partial_prefills": 2,
        "long_prefill_threshold": 300,
        "min_prefill_tokens": 40,
        "num_threads": 2,
    }
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
    arguments += ["--trust-remote-code", "--tenant-weights", "a=1,b=3", "--no-enable-prefix-caching"]
    weights = {"a": 1.0, "b": 3.0}
    expected = EngineConfig(**values, trust_remote_code=True, tenant_weights=weights, enable_prefix_caching=False)
    assert engine_config_from(engine_parser().parse_args(arguments)) == expected
    assert engine_parser().parse_args(["--num-device-blocks", "9"]).num_device_blocks == 9
    assert engine_parser().parse_args(["--kv-cache-memory", "3MiB"]).kv_cache_memory == 3 * 2**20


def test_help_names_every_option_and_loads_neither_torch_nor_ray() -> None:
    code = (
        "import sys; from deployments.cli.main import main; code = main(['generate', '--help'])\n"
        "assert not {'torch', 'ray', 'transformers', 'pydantic'} & set(sys.modules); sys.exit(code)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    for option in ("--prompt-file", "--chat", "--json", "--temperature", "--max-num-batched-tokens", "--revision"):
        assert option in result.stdout


# --- endings


def test_ctrl_c_ends_quietly_with_130(model_folder: Path) -> None:
    command = [sys.executable, "-m", "deployments.cli.main", "generate", "--model", str(model_folder)]
    command += ["--num-threads", "1", "--prompt", "x", "--max-tokens", "2000", "--ignore-eos"]
    # A shell starts what it puts into the background deaf to Ctrl-C; this one hears it.
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stderr is not None
    assert process.stderr.readline().startswith("loading")
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (130, "")
    assert "Traceback" not in errors


def test_a_reader_that_leaves_early_is_no_error(model_folder: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "deployments.cli.main", "generate", "--model", str(model_folder)]
    result = subprocess.run(
        [*command, *SMALL, *GREEDY, "--prompt", "x"], stdout=writer, stderr=subprocess.PIPE, timeout=120, check=False
    )
    os.close(writer)
    assert result.returncode == 0
    assert b"BrokenPipe" not in result.stderr


def test_progress_is_a_line_now_and_then_in_a_file_and_one_that_vanishes_on_a_terminal() -> None:
    now = [0.0]
    file, terminal = io.StringIO(), Terminal()
    with ProgressLine(file, lambda: now[0]) as to_file, ProgressLine(terminal, lambda: now[0]) as to_terminal:
        for second in range(1, 26):
            now[0] = float(second)
            to_file.update(second // 10, 3, second * 5)
            to_terminal.update(second // 10, 3, second * 5)
    lines = file.getvalue().splitlines()
    assert lines == ["1/3 completions, 50 tokens, 5.0 tokens/s", "2/3 completions, 100 tokens, 5.0 tokens/s"]
    assert len(lines) == 25 // FILE_PERIOD_S
    assert terminal.getvalue().count("\r") == 25 + 2
    assert terminal.getvalue().endswith(" \r")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run_cli(*arguments: str, stdin: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deployments.cli.main", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120, check=False)


def assert_one_error_line(capsys: pytest.CaptureFixture[str], line: str) -> None:
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"stallfree: error: {line}")
    assert captured.err.count("\n") == 1
