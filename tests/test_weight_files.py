"""Of what lies in a folder every decoder takes the same tensors for the model: those that Transformers takes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from tests.fused_models import SIZES, Stepper, logits_in_one_go, random_prompt, saved
from tests.tiny_models import load_reference
from worker.config import EngineConfig
from worker.loading import load_runner
from worker.weights import WeightsError, check_checkpoint, check_safetensors, weight_files

PROMPT = random_prompt(20, 1)
BACKENDS = ("auto", "torch_sdpa")
Change = Callable[[Path], None]


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def store(folder: Path, tensors: dict[str, torch.Tensor], name: str = "model.safetensors") -> None:
    save_file({key: value.clone() for key, value in tensors.items()}, folder / name, metadata={"format": "pt"})


def with_head(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Stores beside a tied embedding a head made of it."""

    def edit(folder: Path) -> None:
        tensors = stored(folder)
        assert "lm_head.weight" not in tensors
        store(folder, tensors | {"lm_head.weight": change(tensors["model.embed_tokens.weight"])})

    return edit


def with_the_head_alone(folder: Path) -> None:
    tensors = stored(folder)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    store(folder, tensors)


def in_two_shards(folder: Path) -> None:
    """The embedding in one file, the rest in another, named against the order of what they hold."""
    tensors = stored(folder)
    names = {name: "b.safetensors" if "embed" in name else "a.safetensors" for name in tensors}
    for file in ("a.safetensors", "b.safetensors"):
        store(folder, {name: tensors[name] for name in tensors if names[name] == file}, file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def with_another_file(name: str) -> Change:
    """A file of the same names and other values, as an older copy of the weights is."""

    def add(folder: Path) -> None:
        store(folder, {key: value * 1.5 for key, value in load_file(next(folder.glob("*.safetensors"))).items()}, name)

    return add


def with_an_index_of_other_files(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "kept")
    in_two_shards(folder)
    for name in ("a.safetensors", "b.safetensors"):
        store(folder, {key: -value for key, value in load_file(folder / name).items()}, name)
    shutil.move(folder / "kept", folder / "model.safetensors")


def named_by_the_configuration(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "chosen.safetensors")
    store(folder, {key: -value for key, value in stored(folder).items()})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": "chosen.safetensors"}))


def all_of(*changes: Change) -> Change:
    def change_all(folder: Path) -> None:
        for change in changes:
            change(folder)

    return change_all


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("is_tied", "change"),
    [
        pytest.param(True, with_head(lambda embedding: embedding.flip(0)), id="another head beside a tied embedding"),
        pytest.param(True, with_head(torch.clone), id="the same head beside a tied embedding"),
        pytest.param(True, with_the_head_alone, id="the head alone of the two"),
        pytest.param(False, with_another_file("zz-old.safetensors"), id="another file that comes last"),
        pytest.param(False, with_another_file("consolidated.safetensors"), id="another file that comes first"),
        pytest.param(False, in_two_shards, id="shards with an index"),
        pytest.param(False, all_of(in_two_shards, with_another_file("zz.safetensors")), id="shards and another file"),
        pytest.param(False, with_an_index_of_other_files, id="one file and an index of others"),
        pytest.param(False, named_by_the_configuration, id="a file that config.json names"),
    ],
)
def test_the_tensors_are_those_that_transformers_takes(
    tmp_path: Path, backend: str, is_tied: bool, change: Change
) -> None:
    folder = saved(tmp_path, LlamaConfig(**SIZES, tie_word_embeddings=is_tied))
    change(folder)
    config = EngineConfig(model=str(folder), device="cpu", attention_backend=backend, dtype="float32",
                          max_model_len=64, num_device_blocks=5)  # fmt: skip
    runner = load_runner(config).runner
    logits = Stepper(runner._model, type(runner._backend), [PROMPT]).step({0: len(PROMPT)})[0]
    (want,) = logits_in_one_go(load_reference(folder), PROMPT, [len(PROMPT) - 1])
    torch.testing.assert_close(logits, want, atol=1e-4, rtol=1e-4)


def indexed(weight_map: object) -> Change:
    def write(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "a.safetensors")
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return write


def renamed(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights.safetensors")


def named(value: object) -> Change:
    def write(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": value}))

    return write


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (renamed, "neither model.safetensors nor model.safetensors.index.json.*weights.safetensors"),
        (indexed({"x": "missing.safetensors"}), "lacks missing.safetensors, which its model.safetensors.index.json"),
        (indexed({"x": "../elsewhere.safetensors"}), "no file of this folder"),
        (indexed({"x": 3}), "no file of this folder"),
        (indexed({}), "no weight_map"),
        (indexed(["a.safetensors"]), "no weight_map"),
        (named("missing.safetensors"), "lacks missing.safetensors, which its config.json names"),
        (named("config.json"), "neither safetensors nor an index"),
        (named("/etc/passwd"), "no file of this folder"),
        (named(["model.safetensors"]), "no file of this folder"),
    ],
)
def test_a_folder_whose_weights_are_not_clear_is_refused(
    tmp_path: Path, backend: str, change: Change, words: str
) -> None:
    folder = saved(tmp_path, LlamaConfig(**SIZES))
    change(folder)
    with pytest.raises(WeightsError, match=words) as caught:
        load_runner(EngineConfig(model=str(folder), attention_backend=backend))
    assert "\n" not in str(caught.value)


def test_a_damaged_file_that_is_no_part_of_the_model_does_no_harm(tmp_path: Path) -> None:
    folder = saved(tmp_path, LlamaConfig(**SIZES))
    (folder / "adapter_model.safetensors").write_bytes(b"half of")
    check_safetensors(folder)
    assert weight_files(folder) == [folder / "model.safetensors"]


def test_an_adapter_is_refused_as_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(WeightsError, match="holds a LoRA adapter; adapters are not available yet"):
        check_checkpoint(tmp_path)
