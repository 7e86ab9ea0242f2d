"""Compiles the C++ kernels for this CPU, once, into the user's cache. Knows nothing of what they compute."""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from worker.demo_model import cache_folder

SOURCE_FOLDER = Path(__file__).parent
MAIN_SOURCE = "kernels.cpp"
#: what the kernels are written for; AVX512-BF16 is used where the CPU has it and imitated where not
NEEDED_CPU_FLAGS = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})
FLAGS = ("-O3", "-march=native", "-std=c++20", "-fopenmp", "-shared", "-fPIC")
#: a compiler that hangs must not keep a server from starting
COMPILE_TIMEOUT_S = 120


class NativeUnavailableError(RuntimeError):
    """The kernels cannot be had on this machine; the message says why."""


def ensure_kernels(cache: Path | None = None, extra_flags: tuple[str, ...] = ()) -> Path:
    """The shared library for this source, these flags and this CPU, compiled if the cache lacks it (seconds).

    Several processes may ask at once: one compiles, nobody sees a library half written.
    """
    cpu_flags = _cpu_flags()
    missing = sorted(NEEDED_CPU_FLAGS - cpu_flags)
    if missing:
        raise NativeUnavailableError(f"this CPU lacks {', '.join(missing)}")
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise NativeUnavailableError("there is no C++ compiler (g++)")
    sources = sorted([*SOURCE_FOLDER.glob("*.cpp"), *SOURCE_FOLDER.glob("*.h")])
    digest = hashlib.sha256(repr((compiler, FLAGS, extra_flags, sorted(cpu_flags))).encode())
    for source in sources:
        digest.update(source.name.encode() + source.read_bytes())
    folder = (cache_folder() if cache is None else cache) / "kernels"
    library = folder / f"{digest.hexdigest()[:24]}.so"
    if library.is_file():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "build.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.is_file():
                _compile([compiler, *FLAGS, *extra_flags, str(SOURCE_FOLDER / MAIN_SOURCE)], library)
    except OSError as error:
        raise NativeUnavailableError(f"the cache cannot be written: {error}") from error
    return library


def _compile(command: list[str], library: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=library.parent) as work:
        built = Path(work) / library.name
        try:
            result = subprocess.run(
                [*command, "-o", str(built)], capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise NativeUnavailableError(f"the compiler took more than {COMPILE_TIMEOUT_S} s") from error
        if result.returncode != 0:
            raise NativeUnavailableError(f"the compiler failed: {result.stderr.strip()[-500:]}")
        os.replace(built, library)


def _cpu_flags() -> frozenset[str]:
    """What Linux says the CPU can do; nothing elsewhere."""
    if platform.machine() != "x86_64" or not Path("/proc/cpuinfo").is_file():
        return frozenset()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()
