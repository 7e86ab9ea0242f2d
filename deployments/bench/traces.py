"""Recorded traces: which requests arrived when, from CSV or from Mooncake's JSON lines.

CSV has a header with `arrival_s,input_tokens,output_tokens`, or that of the Azure LLM traces
(`TIMESTAMP,ContextTokens,GeneratedTokens`, with dates for times). Mooncake's lines hold `timestamp` (milliseconds),
`input_length`, `output_length` and `hash_ids`, one for each 512 tokens of the prompt.
"""

import csv
import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

MOONCAKE_BLOCK_TOKENS = 512
_CSV_COLUMNS = ("arrival_s", "input_tokens", "output_tokens")
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class TraceError(ValueError):
    """The file holds no trace that can be replayed; the message names the line."""


@dataclass(frozen=True, slots=True)
class TraceRecord:
    arrival_s: float
    num_input_tokens: int
    num_output_tokens: int
    prefix_keys: tuple[int, ...] = ()


def read_trace(path: Path) -> list[TraceRecord]:
    """Records by arrival, the first at 0. Raises TraceError for what is no trace and OSError for no file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is not UTF-8 text") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise TraceError(f"{path} is empty")
    is_json = numbered[0][1].lstrip().startswith("{")
    records = _read_json_lines(numbered) if is_json else _read_csv(numbered)
    if not records:
        raise TraceError(f"{path} holds no request")
    records.sort(key=lambda record: record.arrival_s)
    start = records[0].arrival_s
    return [
        TraceRecord(record.arrival_s - start, record.num_input_tokens, record.num_output_tokens, record.prefix_keys)
        for record in records
    ]


def _read_csv(numbered: list[tuple[int, str]]) -> list[TraceRecord]:
    header = [name.strip() for name in next(csv.reader([numbered[0][1]]))]
    columns = next((names for names in (_CSV_COLUMNS, _AZURE_COLUMNS) if set(names) <= set(header)), None)
    if columns is None:
        raise TraceError(f"line 1 must name the columns {', '.join(_CSV_COLUMNS)}")
    places = [header.index(name) for name in columns]
    is_date = columns == _AZURE_COLUMNS
    records = []
    for number, line in numbered[1:]:
        cells = next(csv.reader([line]))
        try:
            time_text, input_text, output_text = (cells[place].strip() for place in places)
            arrival_s = datetime.fromisoformat(time_text).timestamp() if is_date else float(time_text)
            records.append(_record(arrival_s, int(input_text), int(output_text), ()))
        except (ValueError, IndexError) as error:
            raise TraceError(f"line {number}: {error}") from error
    return records


def _read_json_lines(numbered: Iterable[tuple[int, str]]) -> list[TraceRecord]:
    records = []
    for number, line in numbered:
        try:
            fields: dict[str, Any] = json.loads(line)
            keys = tuple(int(key) for key in fields.get("hash_ids") or ())
            arrival_s = float(fields["timestamp"]) / 1000.0
            records.append(_record(arrival_s, int(fields["input_length"]), int(fields["output_length"]), keys))
        except KeyError as error:
            raise TraceError(f"line {number}: {error} is missing") from error
        except (ValueError, TypeError, AttributeError) as error:
            raise TraceError(f"line {number}: {error}") from error
    return records


def _record(arrival_s: float, num_input_tokens: int, num_output_tokens: int, keys: tuple[int, ...]) -> TraceRecord:
    """Recorded requests of no tokens (cancelled, or answered from a cache) count as one: every request is sent."""
    if num_input_tokens < 0 or num_output_tokens < 0 or not arrival_s == arrival_s:
        raise ValueError("times and lengths must be numbers from 0 on")
    return TraceRecord(arrival_s, max(1, num_input_tokens), max(1, num_output_tokens), keys)
