"""Which attention backend is taken, and what each of them refuses."""

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
import torch.nn.attention.varlen

from deployments.build_facts import worker_info
from deployments.model_facts import ModelFacts
from tests import fake_flash
from worker.attention import (
    BACKENDS,
    AttentionNeeds,
    CpuNativeBackend,
    FlashAttnBackend,
    TorchSdpaBackend,
    TorchVarlenBackend,
    TritonBackend,
    cpu_native,
    triton_paged,
)
from worker.attention.refusals import refusal
from worker.choices import choose_backend, default_block_size
from worker.config import ATTENTION_BACKENDS, ConfigError, EngineConfig
from worker.native.build import NativeUnavailableError

CPU = AttentionNeeds("cpu", torch.float32, 64)
CUDA = AttentionNeeds("cuda", torch.bfloat16, 128, capability=(9, 0))
FITTING = {"torch_sdpa": CPU, "cpu_native": CPU, "flash_attn": CUDA, "torch_varlen": CUDA, "triton": CUDA}


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = fake_flash.package()
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    return module


def lack(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    for package in packages:
        monkeypatch.setitem(sys.modules, package, None)


def without_compiler() -> None:
    raise NativeUnavailableError("there is no C++ compiler (g++)")


def test_every_backend_is_an_option_and_runs_what_it_is_made_for(flash: ModuleType) -> None:
    assert set(ATTENTION_BACKENDS) == {"auto", *BACKENDS} == {"auto", *FITTING}
    for name, needs in FITTING.items():
        assert choose_backend(name, needs) == (BACKENDS[name], ())


@pytest.mark.parametrize(
    ("name", "change", "option", "words"),
    [
        ("torch_sdpa", {"softcap": True}, "attention_backend", "softcapping"),
        ("torch_sdpa", {"sinks": True}, "attention_backend", "sinks"),
        ("cpu_native", {"device": "cuda"}, "attention_backend", "cuda"),
        ("cpu_native", {"dtype": torch.float16}, "dtype", "float16"),
        ("cpu_native", {"head_size": 20}, "attention_backend", "multiple of 16"),
        ("cpu_native", {"head_size": 512}, "attention_backend", "heads of 512"),
        ("cpu_native", {"softcap": True}, "attention_backend", "softcapping"),
        ("cpu_native", {"sinks": True}, "attention_backend", "sinks"),
        ("flash_attn", {"device": "cpu", "capability": None}, "attention_backend", "cpu"),
        ("flash_attn", {"capability": (7, 5)}, "attention_backend", "8.0, and this device has 7.5"),
        ("flash_attn", {"dtype": torch.float32}, "dtype", "float32"),
        ("flash_attn", {"head_size": 512}, "attention_backend", "heads of 512"),
        ("flash_attn", {"head_size": 20}, "attention_backend", "multiple of 8"),
        ("flash_attn", {"block_size": 16}, "block_size", "multiple of 256, and 16"),
        ("flash_attn", {"sinks": True}, "attention_backend", "sinks"),
        ("torch_varlen", {"device": "cpu", "capability": None}, "attention_backend", "cpu"),
        ("torch_varlen", {"capability": (7, 0)}, "attention_backend", "8.0, and this device has 7.0"),
        ("torch_varlen", {"dtype": torch.float32}, "dtype", "float32"),
        ("torch_varlen", {"head_size": 320}, "attention_backend", "heads of 320"),
        ("torch_varlen", {"block_size": 128}, "block_size", "multiple of 256, and 128"),
        ("torch_varlen", {"softcap": True}, "attention_backend", "softcapping"),
        ("torch_varlen", {"sinks": True}, "attention_backend", "sinks"),
        ("triton", {"capability": (7, 5)}, "attention_backend", "8.0, and this device has 7.5"),
        ("triton", {"dtype": torch.float64}, "dtype", "float64"),
        ("triton", {"head_size": 512}, "attention_backend", "heads of 512"),
        ("triton", {"block_size": 24}, "block_size", "multiple of 16, and 24"),
        ("triton", {"sinks": True}, "attention_backend", "sinks"),
    ],
)
def test_a_refusal_names_the_backend_the_option_and_the_reason(
    flash: ModuleType, name: str, change: dict, option: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        choose_backend(name, replace(FITTING[name], **change))
    assert caught.value.option == option
    assert name in str(caught.value)


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lack(monkeypatch, "flash_attn", "triton", "torch.nn.attention.varlen")
    monkeypatch.setattr(cpu_native, "ensure_kernels", without_compiler)
    reasons = {name: str(refusal(BACKENDS[name], needs)) for name, needs in FITTING.items()}
    assert "flash-attn is not installed" in reasons["flash_attn"]
    assert "triton is not installed" in reasons["triton"]
    assert torch.__version__ in reasons["torch_varlen"]
    assert "C++ compiler" in reasons["cpu_native"]
    assert reasons["torch_sdpa"] == "None"


def test_functions_of_another_version_are_refused_by_the_arguments_they_lack(
    flash: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def old_function(q: object, k: object, v: object, window_size: object, softcap: object) -> None: ...

    def old_varlen(query: object, key: object, value: object, *, scale: object, window_size: object) -> None: ...

    flash.flash_attn_varlen_func = old_function
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", old_varlen)
    with pytest.raises(ConfigError, match="does not take block_table in flash_attn_varlen_func"):
        choose_backend("flash_attn", CUDA)
    with pytest.raises(ConfigError, match="does not take enable_gqa, seqused_k, block_table, num_splits"):
        choose_backend("torch_varlen", CUDA)
    del flash.flash_attn_with_kvcache, flash.flash_attn_varlen_func
    with pytest.raises(ConfigError, match="has no flash_attn_varlen_func"):
        choose_backend("flash_attn", CUDA)


def test_triton_runs_on_a_cpu_in_its_interpreter_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_backend("triton", CPU) == (TritonBackend, ())
    monkeypatch.setattr(triton_paged, "_is_interpreted", lambda: False)
    with pytest.raises(ConfigError, match="TRITON_INTERPRET") as caught:
        choose_backend("triton", CPU)
    assert caught.value.option == "attention_backend"
    assert choose_backend("triton", CUDA) == (TritonBackend, ())


def test_auto_on_cuda_takes_the_first_that_fits_and_says_why_no_better_one_does(
    flash: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose_backend("auto", CUDA) == (FlashAttnBackend, ())
    assert choose_backend("auto", replace(CUDA, softcap=True)) == (FlashAttnBackend, ())
    backend_type, (note,) = choose_backend("auto", replace(CUDA, block_size=16))
    assert backend_type is TritonBackend
    assert "flash_attn needs a multiple of 256, and 16 is none" in note
    lack(monkeypatch, "flash_attn")
    backend_type, (note,) = choose_backend("auto", CUDA)
    assert backend_type is TritonBackend
    assert "flash-attn is not installed" in note
    assert choose_backend("auto", replace(CUDA, dtype=torch.float32))[0] is TritonBackend
    lack(monkeypatch, "triton")
    assert choose_backend("auto", CUDA)[0] is TorchVarlenBackend
    backend_type, (note,) = choose_backend("auto", replace(CUDA, dtype=torch.float32))
    assert backend_type is TorchSdpaBackend
    assert "triton is not installed" in note
    assert "steps take longer" in note


def test_auto_on_a_cpu_takes_its_kernels_or_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_backend("auto", CPU) == (CpuNativeBackend, ())
    backend_type, (note,) = choose_backend("auto", replace(CPU, dtype=torch.float16))
    assert backend_type is TorchSdpaBackend
    assert "float16" in note
    monkeypatch.setattr(cpu_native, "ensure_kernels", without_compiler)
    assert "C++ compiler" in choose_backend("auto", CPU)[1][0]


def test_the_metrics_name_the_backend_that_was_chosen() -> None:
    facts = ModelFacts(64, 512, (2,), 16, 8, 0, attention_backend="triton")
    assert worker_info(EngineConfig(), facts)["attention_backend"] == "triton"


def test_blocks_are_as_large_as_the_chosen_backend_needs() -> None:
    sizes = {name: default_block_size(backend_type) for name, backend_type in BACKENDS.items()}
    assert sizes == {"torch_sdpa": 16, "cpu_native": 16, "flash_attn": 256, "torch_varlen": 256, "triton": 16}
