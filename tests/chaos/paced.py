"""Servers with the paced engine, and streams whose every token is known beforehand."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.client import Stream, ask_all
from tests.chaos.server import ChaosServer
from tests.paced_engine import STEP_VARIABLE, paced_model
from tests.server_process import wait_until
from worker.text import Tokenizer
from worker.types import SamplingParams

MODEL = "tiny"
FREED_TIMEOUT_S = 15.0


def paced_args(folder: Path, num_workers: int, **options: Any) -> dict[str, Any]:
    return {"engine": "paced", "model": str(folder), "num_workers": num_workers, "metrics_port": 0, **options}


def paced_environment(step_ms: float, of_worker: dict[int, float] | None = None) -> dict[str, str]:
    own = {f"{STEP_VARIABLE}_OF_WORKER_{rank}": str(ms) for rank, ms in (of_worker or {}).items()}
    return {STEP_VARIABLE: str(step_ms), **own}


def body(prompt: list[int], max_tokens: int, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **fields}


@dataclass
class Expected:
    """What the paced engine must answer, as text."""

    folder: Path

    def __post_init__(self) -> None:
        self._model = paced_model(self.folder)
        self._tokenizer = Tokenizer(self.folder)

    def text(self, asked: dict[str, Any]) -> str:
        params = SamplingParams(asked["max_tokens"], temperature=asked["temperature"], seed=asked.get("seed", 0))
        return self._tokenizer.decode(self._model.answer(asked["prompt"], params))

    def faults(self, bodies: list[dict[str, Any]], streams: list[Stream]) -> list[str]:
        """Streams that did not end well, or lost, doubled or changed a token."""
        faults = []
        for number, (asked, stream) in enumerate(zip(bodies, streams, strict=True)):
            if not stream.is_done:
                faults.append(f"stream {number}: {stream.end}")
            elif stream.texts != [self.text(asked)]:
                faults.append(f"stream {number}: {stream.texts} instead of {self.text(asked)}")
        return faults


def it_answers_as_ever(server: ChaosServer, expected: Expected) -> None:
    """Nothing is left of what was before, and whoever comes next is served at once."""
    wait_until(server.is_idle, FREED_TIMEOUT_S)
    bodies = [body([7, 20 + i], 20) for i in range(8)]
    streams = asyncio.run(ask_all(server.url, bodies))
    assert expected.faults(bodies, streams) == []
    assert max(stream.ttft_s for stream in streams) < 2.0
