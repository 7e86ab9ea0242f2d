import json
import multiprocessing
import pickle
import shutil
import sys
import time
from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from tests.tiny_models import VOCAB_SIZE, save_tiny_model
from worker import pool_memory, weights
from worker.config import ConfigError, EngineConfig
from worker.demo_model import VERSION, DemoModelError, ensure_demo_model
from worker.loading import check_loadable, load_runner
from worker.weights import WeightsError, resolve_model


class PlantedFile:
    """Unpickling this writes a file: proof that somebody ran code from a checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.path,))


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, "llama")
    assert resolve_model(str(folder)) == folder


def test_a_pickled_checkpoint_is_refused_unopened(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "llama")
    (folder / "model.safetensors").unlink()
    evidence = tmp_path / "evidence"
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(PlantedFile(evidence)))
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin could run code"):
        load_runner(EngineConfig(model=str(folder)))
    assert not evidence.exists()
    pickle.loads((folder / "pytorch_model.bin").read_bytes())
    assert evidence.exists(), "the planted file would not have shown anything"


def test_a_pickle_beside_safetensors_is_never_opened(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", "llama")
    evidence = tmp_path / "evidence"
    for name in ("pytorch_model.bin", "model.pt", "training_args.bin"):
        (folder / name).write_bytes(pickle.dumps(PlantedFile(evidence)))
    load_runner(EngineConfig(model=str(folder), max_model_len=64, num_device_blocks=5))
    assert not evidence.exists()


def test_code_in_a_folder_is_not_run_without_the_operators_word(tmp_path: Path) -> None:
    evidence = tmp_path / "evidence"
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(
        '{"model_type": "inhouse", "architectures": ["InHouseForCausalLM"],'
        ' "auto_map": {"AutoConfig": "configuration.InHouseConfig"}}'
    )
    (folder / "configuration.py").write_text(f"open({str(evidence)!r}, 'w')\n")
    (folder / "model.safetensors").touch()
    with pytest.raises(ValueError, match="InHouseForCausalLM"):
        load_runner(EngineConfig(model=str(folder)))
    assert not evidence.exists()


def test_code_that_the_operator_trusts_runs_like_any_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Transformers copies such code into its module cache, which is this test's own.
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.path", [*sys.path, str(tmp_path / "modules")])
    folder = save_tiny_model(tmp_path / "model", "llama")
    (folder / "inhouse.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n\n\n"
        "class InHouseConfig(LlamaConfig):\n    model_type = 'inhouse'\n\n\n"
        "class InHouseForCausalLM(LlamaForCausalLM):\n    config_class = InHouseConfig\n"
    )
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "inhouse"
    config["architectures"] = ["InHouseForCausalLM"]
    config["auto_map"] = {"AutoConfig": "inhouse.InHouseConfig", "AutoModelForCausalLM": "inhouse.InHouseForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config))
    options = {"model": str(folder), "max_model_len": 64, "num_device_blocks": 5}
    with pytest.raises(ValueError, match="trust-remote-code"):
        load_runner(EngineConfig(**options))
    assert load_runner(EngineConfig(**options, trust_remote_code=True)).facts.vocab_size == VOCAB_SIZE


@pytest.mark.parametrize("model", ["./nowhere", "/nowhere/at/all", "~/nowhere/x", "a/b/c", "", "../up"])
def test_a_path_without_a_folder_is_refused_and_not_asked_of_the_hub(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(weights, "snapshot_download", lambda *args, **options: pytest.fail("the Hub was asked"))
    with pytest.raises(WeightsError):
        resolve_model(model)


def test_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(WeightsError, match="is a file"):
        resolve_model(str(path))


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"config\.json"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
def test_a_damaged_configuration_is_refused_by_its_name(tmp_path: Path, name: str, content: bytes) -> None:
    folder = save_tiny_model(tmp_path, "llama")
    (folder / name).write_bytes(content)
    with pytest.raises(WeightsError, match=name) as caught:
        load_runner(EngineConfig(model=str(folder), max_model_len=64, num_device_blocks=5))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("backend", ["auto", "torch_sdpa"])
@pytest.mark.parametrize("num_bytes", [0, 1000])
def test_weights_that_were_cut_off_are_refused_by_their_name(tmp_path: Path, backend: str, num_bytes: int) -> None:
    folder = save_tiny_model(tmp_path, "llama")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:num_bytes])
    config = EngineConfig(model=str(folder), max_model_len=64, num_device_blocks=5, attention_backend=backend)
    with pytest.raises(WeightsError, match=r"model\.safetensors") as caught:
        load_runner(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_memory": 99999 * 2**30}, r"^kv_cache_memory: .* take 99999\.0 GiB, .* has [0-9.]+ GiB$"),
        ({"num_device_blocks": 10**11}, r"^num_device_blocks: .* GiB, .* GiB$"),
        ({"num_device_blocks": 9, "num_host_blocks": 10**11}, r"^num_host_blocks: .* GiB, .* GiB$"),
        ({"num_device_blocks": 9, "num_threads": 100_000}, r"^num_threads: 100000 is over"),
    ],
)
def test_what_this_machine_cannot_give_is_refused_before_weights_are_read(
    tmp_path: Path, options: dict[str, int], message: str
) -> None:
    config = EngineConfig(model=str(save_tiny_model(tmp_path, "llama")), max_model_len=64, device="cpu", **options)
    with pytest.raises(ConfigError, match=message):
        check_loadable(config)


def test_a_pool_that_the_system_refuses_is_refused_with_both_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_memory, "memory_bytes", lambda: 2**62)
    folder = save_tiny_model(tmp_path, "llama")
    with pytest.raises(ConfigError, match=r"^kv_cache_memory: .* take [0-9.]+ GiB, .* free [0-9.]+ GiB$"):
        load_runner(EngineConfig(model=str(folder), max_model_len=64, device="cpu", kv_cache_memory=99999999 * 2**30))


@pytest.mark.parametrize("trusted", [False, True])
def test_of_a_hub_repository_only_safe_files_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trusted: bool
) -> None:
    folder = save_tiny_model(tmp_path, "llama")
    asked = {}

    def fetch(model: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.update(model=model, revision=revision, patterns=allow_patterns)
        return str(folder)

    monkeypatch.setattr(weights, "snapshot_download", fetch)
    assert resolve_model("owner/name", "v1", trust_remote_code=trusted) == folder
    assert (asked["model"], asked["revision"]) == ("owner/name", "v1")
    assert "*.safetensors" in asked["patterns"]
    assert not [pattern for pattern in asked["patterns"] if pattern.endswith((".bin", ".pt", ".pth", "*"))]
    assert ("*.py" in asked["patterns"]) is trusted


def test_a_hub_that_does_not_answer_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(*args: object, **options: object) -> str:
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(weights, "snapshot_download", fetch)
    with pytest.raises(WeightsError, match=r"owner/name.*no connection"):
        resolve_model("owner/name")


def slow_build(work: Path, target: Path) -> None:
    target.mkdir()
    (target / "first").write_text("1")
    time.sleep(0.3)
    (target / "second").write_text("2")
    with (work.parent / "builds").open("a") as builds:
        builds.write("x")


def ensure_in_process(cache: Path) -> None:
    folder = ensure_demo_model(cache, slow_build)
    assert {path.name for path in folder.iterdir()} == {"first", "second"}


def test_several_processes_at_once_convert_the_demo_model_once(tmp_path: Path) -> None:
    processes = [
        multiprocessing.get_context("fork").Process(target=ensure_in_process, args=(tmp_path,)) for _ in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(20)
    assert [process.exitcode for process in processes] == [0, 0, 0, 0]
    assert (tmp_path / "builds").read_text() == "x"


def test_a_conversion_that_fails_leaves_nothing_and_the_next_one_succeeds(tmp_path: Path) -> None:
    def broken(work: Path, target: Path) -> None:
        target.mkdir()
        (target / "half").touch()
        raise DemoModelError("the network went away")

    with pytest.raises(DemoModelError):
        ensure_demo_model(tmp_path, broken)
    assert [path.name for path in tmp_path.iterdir()] == [f"demo-{VERSION}.lock"]
    ensure_in_process(tmp_path)


def test_a_conversion_that_was_killed_is_cleared_away_by_the_next(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=ensure_in_process, args=(tmp_path,))
    process.start()
    deadline = time.monotonic() + 10
    while not list(tmp_path.glob(".demo-*/model/first")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.kill()
    process.join(10)
    assert list(tmp_path.glob(".demo-*/model/first"))
    assert not (tmp_path / f"demo-{VERSION}").exists()
    ensure_in_process(tmp_path)
    assert not list(tmp_path.glob(".demo-*"))


@pytest.mark.model
def test_the_demo_model_is_fetched_once_and_then_at_hand(tmp_path: Path) -> None:
    folder = resolve_model("demo")
    started = time.monotonic()
    assert resolve_model("demo") == folder
    assert time.monotonic() - started < 0.5
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names
    copy = shutil.copytree(folder, tmp_path / "copy")
    facts = load_runner(EngineConfig(model=str(copy), max_model_len=64, num_device_blocks=5)).facts
    assert facts.vocab_size == 49152
    assert facts.eos_token_ids == (2,)
