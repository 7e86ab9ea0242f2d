"""How long this machine's steps take: a recorded run of the real engine, a model fitted to it, and its noise.

Owns what is run for the recording. The fit is `scheduler.step_fit`'s.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from benchmarks.driving import drive
from benchmarks.options import BadValueError
from scheduler.recording_reader import Recording, RecordingError
from scheduler.replay import Replayer
from scheduler.step_fit import FitError, StepTimes
from scheduler.step_model import StepModel, StepWork
from worker.config import EngineConfig
from worker.engine import Engine

#: (requests open at once, requests) of each part of the recorded run; their lengths are drawn evenly
PARTS = ((1, 4), (4, 16), (16, 48), (32, 64))
INPUT_TOKENS = (16, 1024)
OUTPUT_TOKENS = (16, 96)
MAX_NUM_BATCHED_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Machine:
    """`noise` has, for each recorded step, how long it took over how long the model says."""

    model: StepModel
    noise: tuple[float, ...]


class NoisySteps:
    """Step times for the simulator: what the model says, times a recorded deviation that is drawn again."""

    def __init__(self, machine: Machine, draw: Random) -> None:
        self._machine = machine
        self._draw = draw
        self.between_steps_s = machine.model.between_steps_s

    def step_s(self, work: StepWork) -> float:
        return self._machine.model.step_s(work) * self._draw.choice(self._machine.noise)


def record_run(path: Path, model: str, num_threads: int | None, parts: Sequence[tuple[int, int]] = PARTS) -> None:
    """About half a minute of the demo model on two cores: decodes alone, and beside chunks of all sizes."""
    draw = Random("recording")
    engine = Engine(
        EngineConfig(
            model=model,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            max_model_len=INPUT_TOKENS[1] + OUTPUT_TOKENS[1],
            num_threads=num_threads,
            record=str(path),
        )
    )
    for concurrency, count in parts:
        lengths = [(draw.randint(*INPUT_TOKENS), draw.randint(*OUTPUT_TOKENS)) for _ in range(count)]
        drive(engine, lengths, concurrency, draw)
    engine.close()


def read_machine(path: Path) -> Machine:
    """From a recording. Raises RecordingError or FitError, which says so if this version decides otherwise than the
    one that wrote it."""
    recording = Recording(path)
    times = StepTimes(recording.pools.block_size)
    difference = Replayer(recording, [times]).run().difference
    if difference is not None:
        raise FitError(f"{path}: this version decides step {difference.step_id} otherwise than recorded; record anew")
    model = times.fit()
    noise = tuple(
        duration_s / model.step_s(work) for work, duration_s in zip(times.works, times.durations_s, strict=True)
    )
    return Machine(model, noise)


def machine_of(recording: Path | None, model: str, num_threads: int | None) -> Machine:
    """From this recording, or from a run that is recorded now. Raises BadValueError for a recording of no use."""
    if recording is not None:
        try:
            return read_machine(recording)
        except (RecordingError, FitError) as error:
            raise BadValueError(f"--recording: {error}") from error
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "machine.rec"
        record_run(path, model, num_threads)
        return read_machine(path)
