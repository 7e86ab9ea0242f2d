"""From what an operator names (a folder, a Hub id, `demo`) to a local folder of safetensors.

Knows files, not models. Pickled weights are never opened: a folder without safetensors is refused.
"""

import json
import re
from pathlib import Path
from typing import Any, NoReturn

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open

from worker.demo_model import ensure_demo_model

DEMO = "demo"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MODEL_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "*.txt"]


class WeightsError(ValueError):
    """There is no usable checkpoint under this name."""


def resolve_model(model: str, revision: str | None = None, *, trust_remote_code: bool = False) -> Path:
    """The local folder of `model`: `demo`, an existing folder, or a Hub id (fetched, with progress on stderr).

    Raises `WeightsError` if it is none of these or holds no safetensors. Python files are fetched only if trusted.
    """
    if model == DEMO:
        return check_checkpoint(ensure_demo_model())
    folder = Path(model).expanduser()
    if folder.is_dir():
        return check_checkpoint(folder)
    if folder.exists():
        raise WeightsError(f"{model} is a file: name the folder that holds the checkpoint")
    if not _HUB_ID.fullmatch(model):
        raise WeightsError(f"there is no folder {model}, and it is no Hub id of the form owner/name")
    patterns = [*_MODEL_FILES, "*.py"] if trust_remote_code else _MODEL_FILES
    try:
        fetched = snapshot_download(model, revision=revision, allow_patterns=patterns)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise WeightsError(f"there is no folder {model}, and the Hub gave none: {error}") from error
    return check_checkpoint(Path(fetched))


def check_checkpoint(folder: Path) -> Path:
    """`folder` itself, if it has a configuration and safetensors; raises `WeightsError` if not."""
    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            raise WeightsError(f"{folder} holds a LoRA adapter; adapters are not available yet")
        raise WeightsError(f"{folder} holds no config.json")
    if not any(folder.glob("*.safetensors")):
        pickles = sorted(path.name for path in [*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")])
        found = f": {', '.join(pickles)} could run code when opened; convert them" if pickles else ""
        raise WeightsError(f"{folder} holds no .safetensors file{found}")
    weight_files(folder)
    return folder


def weight_files(folder: Path) -> list[Path]:
    """The safetensors that hold the model, in the order in which a later one overrides: those that Transformers reads.

    The file or index that config.json names, else `model.safetensors`, else what its index lists. Others in the
    folder are something else: adapters, another format, leftovers. Raises `WeightsError`.
    """
    chosen = read_json_object(folder / "config.json").get("transformers_weights")
    if chosen is None:
        chosen = SINGLE_FILE if (folder / SINGLE_FILE).is_file() else INDEX_FILE
        if not (folder / chosen).is_file():
            _refuse_unnamed(folder)
    path = _inside(folder, chosen, "config.json")
    if path.suffix == ".safetensors":
        return [path]
    if not path.name.endswith(".safetensors.index.json"):
        raise WeightsError(f"{path} is neither safetensors nor an index of safetensors")
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{path} has no weight_map")
    return sorted({_inside(folder, name, path.name) for name in weight_map.values()})


def check_safetensors(folder: Path) -> None:
    """Raises `WeightsError` for a file whose header does not match its length, as after an interrupted download."""
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{path} is no complete safetensors file: {error}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """Raises `WeightsError` if the file cannot be read or holds anything but a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise WeightsError(f"{path} is not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{path} is not a JSON object")
    return value


def _inside(folder: Path, name: object, named_by: str) -> Path:
    """A file of the folder; nothing that a checkpoint names is opened elsewhere."""
    if not isinstance(name, str) or Path(name).is_absolute() or ".." in Path(name).parts:
        raise WeightsError(f"{folder}: {named_by} names {name!r}, which is no file of this folder")
    path = folder / name
    if not path.is_file():
        raise WeightsError(f"{folder} lacks {name}, which its {named_by} names")
    return path


def _refuse_unnamed(folder: Path) -> NoReturn:
    found = ", ".join(sorted(path.name for path in folder.glob("*.safetensors")))
    raise WeightsError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}, which would say what {found} is")
