"""Reads what `recording.py` wrote: the header, and the events in their order. The last line may be cut off."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kv_cache import BlockKey, BlockManager
from scheduler.arrivals import Arrival, ResumedOutput
from scheduler.config import PreemptionMode, QueuePolicy, SchedulerConfig, SchedulerPolicy
from scheduler.limits import StepLimits
from scheduler.recording import FORMAT, FORMAT_VERSION
from scheduler.sequence import SequenceStatus


class RecordingError(ValueError):
    """Not a recording that can be read; the message says where and why."""


@dataclass(slots=True)
class Ended:
    request_id: str
    time_s: float
    status: SequenceStatus


@dataclass(slots=True)
class Finished:
    request_id: str
    time_s: float
    index: int


@dataclass(slots=True)
class Rates:
    prefill_tokens_per_s: float
    swap_blocks_per_s: float


@dataclass(slots=True)
class Planned:
    time_s: float
    digest: str


@dataclass(slots=True)
class Settled:
    """`counts`: tokens that a sequence takes, and whether a stop token is the last of them, where that is not one
    and no. `same`: (sibling, count) of the tokens that a sequence has in common with one. `beams`: parents' places."""

    step_id: int
    time_s: float
    counts: dict[int, tuple[int, bool]] = field(default_factory=dict)
    same: dict[int, tuple[int, int]] = field(default_factory=dict)
    block_keys: dict[int, list[BlockKey]] = field(default_factory=dict)
    beams: dict[str, list[int]] = field(default_factory=dict)


Event = Arrival | Ended | Finished | Rates | StepLimits | Planned | Settled


@dataclass(frozen=True, slots=True)
class Pools:
    """What a block manager is made from."""

    block_size: int
    num_device_blocks: int
    num_host_blocks: int
    watermark: float

    def make(self) -> BlockManager:
        return BlockManager(
            self.block_size, self.num_device_blocks, self.num_host_blocks, watermark=self.watermark
        )


class Recording:
    """A recording on disk; each call of `events` reads it anew."""

    def __init__(self, path: Path) -> None:
        """Reads the header. Raises RecordingError, or OSError."""
        self.path = path
        with path.open(encoding="utf-8") as file:
            header = _parsed(file.readline(), path, 1)
        if header.get("format") != FORMAT:
            raise RecordingError(f"{path} is not a recording")
        if header["version"] != FORMAT_VERSION:
            raise RecordingError(f"{path} has format version {header['version']}; this is {FORMAT_VERSION}")
        self.options: dict[str, Any] = header["scheduler"]
        self.config = _config(self.options)
        self.pools = Pools(
            header["block_size"], header["num_device_blocks"], header["num_host_blocks"], header["watermark"]
        )

    def events(self) -> Iterator[Event]:
        with self.path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if number > 1 and line.endswith("\n"):  # else the recorder was cut off in the middle of it
                    try:
                        yield _event(_parsed(line, self.path, number))
                    except (KeyError, TypeError, IndexError) as error:
                        raise RecordingError(f"{self.path}: line {number} is not an event: {error!r}") from error


def is_recording(path: Path) -> bool:
    """Whether the first line says so."""
    with path.open("rb") as file:
        return FORMAT.encode() in file.readline(200)


def _parsed(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise RecordingError(f"{path}: line {number} is not JSON") from error
    if not isinstance(value, dict):
        raise RecordingError(f"{path}: line {number} is not an object")
    return value


def _config(options: dict[str, Any]) -> SchedulerConfig:
    values = dict(options)
    return SchedulerConfig(
        policy=SchedulerPolicy(values.pop("scheduler_policy")),
        preemption_mode=PreemptionMode(values.pop("preemption_mode")),
        queue_policy=QueuePolicy(values.pop("queue_policy")),
        **values,
    )


def _event(line: dict[str, Any]) -> Event:
    if "schedule" in line:
        return Planned(line["schedule"], line["digest"])
    if "update" in line:
        return Settled(
            line["update"],
            line["time"],
            {seq_id: (count, bool(is_stopped)) for seq_id, count, is_stopped in line.get("counts", ())},
            {seq_id: (sibling_id, count) for seq_id, sibling_id, count in line.get("same", ())},
            {int(seq_id): _keys(keys) for seq_id, keys in line.get("block_keys", {}).items()},
            line.get("beams", {}),
        )
    if "add" in line:
        return _arrival(line)
    if "end" in line:
        return Ended(line["end"], line["time"], SequenceStatus(line["status"]))
    if "finish" in line:
        return Finished(line["finish"], line["time"], line["index"])
    if "limits" in line:
        return StepLimits(*line["limits"])
    return Rates(*line["rates"])


def _arrival(line: dict[str, Any]) -> Arrival:
    return Arrival(
        line["add"],
        line["time"],
        line["num_prompt_tokens"],
        line["max_tokens"],
        line["max_num_tokens"],
        line.get("min_tokens", 0),
        line.get("num_samples", 1),
        line.get("is_beam", False),
        line.get("priority", 0),
        line.get("tenant", ""),
        [ResumedOutput(*output) for output in line.get("outputs", ())],
        [_keys(keys) for keys in line.get("block_keys", ())],
        tuple(line.get("ended_samples", ())),
    )


def _keys(texts: list[str]) -> list[BlockKey]:
    return [text.encode() for text in texts]
