"""Building the kernels: once, for this CPU, seen whole or not at all; and what happens where they cannot be had."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.fused_models import CONFIGURATIONS, Stepper, random_prompt, saved
from worker.attention import AttentionNeeds, CpuNativeBackend, TorchSdpaBackend
from worker.choices import choose_backend
from worker.config import ConfigError, EngineConfig
from worker.fused.native_decoder import NativeDecoder
from worker.fused.torch_decoder import TorchDecoder
from worker.loading import check_loadable, load_runner
from worker.native import build
from worker.native.build import NativeUnavailableError, ensure_kernels
from worker.native.kernels import Kernels, interleave, pack_weight


def test_the_library_is_built_once_and_several_may_ask_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as threads:
        paths = set(threads.map(lambda _: ensure_kernels(tmp_path, ("-O0",)), range(3)))
    (path,) = paths
    built_at = path.stat().st_mtime_ns
    assert ensure_kernels(tmp_path, ("-O0",)) == path
    assert path.stat().st_mtime_ns == built_at
    assert {file.name for file in path.parent.iterdir()} == {path.name, "build.lock"}


def test_other_flags_or_another_source_are_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ensure_kernels(tmp_path, ("-O0",))
    source = tmp_path / "source"
    source.mkdir()
    for path in build.SOURCE_FOLDER.iterdir():
        if path.suffix in (".cpp", ".h"):
            (source / path.name).write_text(path.read_text() + "\n// changed\n")
    monkeypatch.setattr(build, "SOURCE_FOLDER", source)
    assert ensure_kernels(tmp_path, ("-O0",)) != first


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("_cpu_flags", lambda: frozenset({"avx2"}), "avx512"),
        ("FLAGS", ("--no-such-flag",), "compiler failed"),
    ],
)
def test_what_cannot_be_built_says_why_and_the_engine_goes_on_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: object, reason: str
) -> None:
    monkeypatch.setattr(build, name, value)
    with pytest.raises(NativeUnavailableError, match=reason):
        ensure_kernels(tmp_path)
    folder = saved(tmp_path / "model", CONFIGURATIONS["smollm"])
    config = EngineConfig(model=str(folder), max_num_batched_tokens=64, max_num_seqs=4)
    (note,) = check_loadable(config)
    assert reason in note
    assert isinstance(load_runner(config).runner._model, TorchDecoder)
    with pytest.raises(ConfigError, match=reason):
        choose_backend("cpu_native", AttentionNeeds("cpu", torch.float32, 64))


def test_without_a_compiler_the_engine_goes_on_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    with pytest.raises(NativeUnavailableError, match="compiler"):
        ensure_kernels(tmp_path)


def test_a_cpu_takes_the_kernels_unless_something_else_is_asked_for(tmp_path: Path) -> None:
    assert choose_backend("auto", AttentionNeeds("cpu", torch.bfloat16, 64)) == (CpuNativeBackend, ())
    assert choose_backend("torch_sdpa", AttentionNeeds("cpu", torch.bfloat16, 64)) == (TorchSdpaBackend, ())
    assert choose_backend("auto", AttentionNeeds("cpu", torch.float32, 20))[0] is TorchSdpaBackend
    folder = saved(tmp_path, CONFIGURATIONS["smollm"])
    sizes = {"max_num_batched_tokens": 64, "max_num_seqs": 4}
    assert isinstance(load_runner(EngineConfig(model=str(folder), **sizes)).runner._model, NativeDecoder)
    plain = load_runner(EngineConfig(model=str(folder), attention_backend="torch_sdpa", **sizes))
    assert type(plain.runner._model).__name__ == "CausalModel"


def test_bfloat16_is_right_where_the_cpu_cannot_multiply_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIGURATIONS["qwen3"]
    decoder = NativeDecoder(saved(tmp_path, config), config, torch.bfloat16)
    prompt = [random_prompt(40, 1)]
    stepper = Stepper(decoder, CpuNativeBackend, prompt)
    want = [stepper.step({0: 30})[0], stepper.step({0: 10})[0]]
    imitated = Kernels(ensure_kernels(tmp_path, ("-mno-avx512bf16",)))
    stepper = Stepper(decoder, CpuNativeBackend, prompt)
    monkeypatch.setattr(stepper._runner._backend, "kernels", imitated)
    got = [stepper.step({0: 30})[0], stepper.step({0: 10})[0]]
    torch.testing.assert_close(torch.stack(got), torch.stack(want), atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_weights_hold_every_number_where_the_kernels_look(dtype: torch.dtype) -> None:
    weight = torch.arange(40 * 8).view(40, 8).to(dtype)
    packed = pack_weight(weight)
    per_word = 2 if dtype == torch.bfloat16 else 1
    assert packed.shape == (2, 8 // per_word, 32, per_word)
    assert torch.equal(packed[1, :, 3].flatten(), weight[35])
    assert not packed[1, :, 8:].any()


def test_gate_and_up_outputs_of_one_place_stand_sixteen_apart() -> None:
    merged = interleave(torch.arange(32), torch.arange(100, 132))
    assert merged.tolist() == [*range(16), *range(100, 116), *range(16, 32), *range(116, 132)]


def test_the_read_of_memory_sees_every_byte() -> None:
    words = torch.arange(100_003)
    kernels = Kernels(ensure_kernels())
    assert kernels.read_words(words, 2) == kernels.read_words(words, 1) == int(words.sum())


def test_the_kernels_import_neither_a_server_nor_a_cluster() -> None:
    program = "import sys, worker.native.kernels\nprint(sorted({'ray', 'fastapi'} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd=Path(build.__file__).parents[2],
        env={**os.environ},
    )
    assert result.stdout.strip() == "[]"
