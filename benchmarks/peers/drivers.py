"""The drivers as processes: how each is started, and how it is asked for a row."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
OURS = "stallfree"
PEERS = ("vllm", "llama", "transformers")
#: GiB of vLLM's cache: enough for every row at once
VLLM_CACHE_GIB = 4


class PeerError(RuntimeError):
    """A peer is not set up, could not start, or stopped while it was asked; its own words are on standard error."""


@dataclass(frozen=True, slots=True)
class Setting:
    """`environments` is the folder that setup.sh filled; `own_options` are engine options, `NAME=VALUE`."""

    model_folder: Path
    environments: Path
    gguf: Path | None
    num_threads: int
    own_options: tuple[str, ...] = ()

    def command(self, engine: str) -> list[str]:
        if engine == OURS:
            driver = str(FOLDER / "stallfree_driver.py")
            return [sys.executable, driver, str(self.model_folder), str(self.num_threads), *self.own_options]
        python = self.environments / engine / "bin" / "python"
        if not python.exists():
            raise PeerError(f"{engine} is not set up: benchmarks/peers/setup.sh {self.environments} {engine}")
        model = self.gguf_file() if engine == "llama" else self.model_folder
        name = {"llama": "llama_cpp"}.get(engine, engine)
        return [str(python), str(FOLDER / f"{name}_driver.py"), str(model), str(self.num_threads)]

    def gguf_file(self) -> Path:
        """Raises PeerError if there is none."""
        found = self.gguf or next(iter((self.environments / "demo-gguf").rglob("*.gguf")), None)
        if found is None:
            raise PeerError("llama needs --gguf FILE")
        return found

    def environment(self, engine: str) -> dict[str, str]:
        """Threads that wait sleep, unless the caller's environment says otherwise: the engines share the cores, and
        only one is asked at a time."""
        variables = {
            "OMP_WAIT_POLICY": "PASSIVE",
            "KMP_BLOCKTIME": "0",
            "TOKENIZERS_PARALLELISM": "false",
            **os.environ,
            "OMP_NUM_THREADS": str(self.num_threads),
        }
        if engine == OURS:
            variables["PYTHONPATH"] = str(ROOT)
        else:
            variables.pop("PYTHONPATH", None)
        if engine == "vllm":
            cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[: self.num_threads])
            variables |= {
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_CPU_KVCACHE_SPACE": str(VLLM_CACHE_GIB),
                "VLLM_CPU_OMP_THREADS_BIND": cores,
                "VLLM_NO_USAGE_STATS": "1",
            }
        return variables


def peers_at_hand(setting: Setting) -> list[str]:
    """The peers that are set up; what is said of the others goes to standard error. Raises PeerError if none is."""
    found: list[str] = []
    reasons: list[str] = []
    for peer in PEERS:
        try:
            setting.command(peer)
            found.append(peer)
        except PeerError as error:
            reasons.append(str(error))
    if not found:
        raise PeerError("; ".join(reasons))
    for reason in reasons:
        print(reason, file=sys.stderr, flush=True)
    return found


class Driver:
    """One engine's process, loaded and waiting. Use as a context: leaving it ends the process."""

    def __init__(self, engine: str, setting: Setting) -> None:
        self.engine = engine
        self._process = subprocess.Popen(
            setting.command(engine),
            env=setting.environment(engine),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            started = self._read()
        except PeerError:
            self.close()
            raise
        self.name: str = started["engine"]
        self.start_s: float = started["start_s"]

    def ask(self, row: str, round_number: int) -> dict[str, Any]:
        """`tokens_per_s` and `seconds` of one run of a row."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{row} {round_number}\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise PeerError(f"{self.engine} has ended") from error
        return self._read()

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()

    def __enter__(self) -> "Driver":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"{self.engine} ended with exit code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer
