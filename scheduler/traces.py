"""Reads traces of arrivals: CSV with lengths, or JSON lines with the hashes of prompt blocks (Mooncake's format).

Knows nothing of engines. A request is kept small until it is its turn: its block keys are made then.
"""

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from kv_cache import BlockKey
from scheduler.arrivals import Arrival, Work

#: tokens that one hash of a Mooncake trace stands for
HASH_BLOCK_TOKENS = 512
#: a year: beyond it is no time but a mistake
MAX_ARRIVAL_S = 366 * 86400.0
CSV_COLUMNS = ("arrival_s", "input_tokens", "output_tokens")


class TraceError(ValueError):
    """Not a trace that can be read; the message says where and why."""


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """`hash_ids` names each `HASH_BLOCK_TOKENS` tokens of the prompt together with all before them."""

    arrival_s: float
    num_input_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...] = ()
    priority: int = 0
    tenant: str = ""

    def block_keys(self, block_size: int) -> list[BlockKey]:
        """Of the whole blocks of the prompt. A block is as its last token's hash and the place in it say, for a
        hash stands for everything up to it."""
        if not self.hash_ids:
            return []
        ends = range(block_size - 1, self.num_input_tokens, block_size)
        return [b"%d:%d" % (self.hash_ids[end // HASH_BLOCK_TOKENS], end % HASH_BLOCK_TOKENS) for end in ends]


def read_trace(path: Path, limit: int | None = None) -> list[TracedRequest]:
    """The first `limit` requests, in the order of their arrivals. Raises TraceError, or OSError."""
    # Spreadsheets put a byte-order mark in front.
    with path.open(encoding="utf-8-sig", newline="") as file:
        found: list[TracedRequest] = []
        try:
            first = file.read(1)
            file.seek(0)
            for request in _json_requests(file, path) if first == "{" else _csv_requests(file, path):
                if limit is not None and len(found) == limit:
                    break
                found.append(request)
        except UnicodeDecodeError as error:
            raise TraceError(f"{path} is not text: {error}") from error
    if not found:
        raise TraceError(f"{path} holds no request")
    found.sort(key=lambda request: request.arrival_s)
    return found


def works_of(requests: Iterable[TracedRequest], block_size: int, max_model_len: int) -> Iterator[Work]:
    """What the simulator takes; the requests are numbered from 1."""
    for number, request in enumerate(requests, 1):
        num_output_tokens = max(request.num_output_tokens, 1)
        keys = request.block_keys(block_size)
        yield Work(
            Arrival(
                f"r{number}",
                request.arrival_s,
                request.num_input_tokens,
                num_output_tokens,
                max_model_len,
                priority=request.priority,
                tenant=request.tenant,
                block_keys=[keys] if keys else [],
            ),
            [num_output_tokens],
        )


def _csv_requests(file: TextIO, path: Path) -> Iterator[TracedRequest]:
    """Further columns, `priority` and `tenant`, may follow the three that there have to be."""
    reader = csv.DictReader(file)
    missing = [column for column in CSV_COLUMNS if column not in (reader.fieldnames or ())]
    if missing:
        raise TraceError(f"{path}: the first line names no column {missing[0]}")
    for row in reader:
        if any(row[column] is None for column in CSV_COLUMNS):
            raise TraceError(f"{path}: line {reader.line_num}: too few columns")
        try:
            request = TracedRequest(
                float(row["arrival_s"]),
                int(row["input_tokens"]),
                int(row["output_tokens"]),
                priority=int(row.get("priority") or 0),
                tenant=row.get("tenant") or "",
            )
        except (TypeError, ValueError) as error:
            raise TraceError(f"{path}: line {reader.line_num}: {error}") from error
        yield _checked(request, path, reader.line_num)


def _json_requests(file: TextIO, path: Path) -> Iterator[TracedRequest]:
    """`timestamp` is in milliseconds."""
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            request = TracedRequest(
                float(value["timestamp"]) / 1000.0,
                int(value["input_length"]),
                int(value["output_length"]),
                tuple(map(int, value.get("hash_ids", ()))),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(f"{path}: line {number}: {type(error).__name__}: {error}") from error
        if request.hash_ids and len(request.hash_ids) * HASH_BLOCK_TOKENS < request.num_input_tokens:
            raise TraceError(f"{path}: line {number} has too few hash_ids for its input_length")
        yield _checked(request, path, number)


def _checked(request: TracedRequest, path: Path, line: int) -> TracedRequest:
    is_time = 0.0 <= request.arrival_s <= MAX_ARRIVAL_S
    if request.num_input_tokens < 1 or request.num_output_tokens < 0 or not is_time:
        raise TraceError(f"{path}: line {line} has a time or a length that cannot be")
    return request
