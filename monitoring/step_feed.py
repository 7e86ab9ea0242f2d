"""Steps as the dashboard draws them: short rows of plain numbers, the newest of each worker, for whoever asks.

Owns what a row says and how many are kept. Knows neither Ray nor the page.
"""

import threading
from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import TypedDict
from uuid import uuid4

from scheduler.records import StepRecord

#: steps that are kept of each worker
MAX_STEPS = 5000
#: workers that are kept; the one that was silent longest goes first
MAX_WORKERS = 64
#: prefill chunks that are named in one row
MAX_CHUNKS = 8
#: rows of one answer: of more, the oldest are left out
MAX_ROWS = 20_000

FIELDS = (
    *("step_id", "ended_ms", "duration_ms", "num_decodes", "num_prefill_tokens", "budget"),
    *("num_waiting", "num_running", "num_swapped", "num_blocks", "num_preemptions", "waiting_reason", "chunks"),
    *("num_blocks_swapped_out", "num_blocks_swapped_in"),
)
#: values in the order of `FIELDS`; `chunks` is a list of [request id, tokens], for the first `MAX_CHUNKS`
Row = list[object]
_ENDED, _DURATION = FIELDS.index("ended_ms"), FIELDS.index("duration_ms")


class StepBatch(TypedDict):
    """`store_id` changes when everything was lost; `cursor` is what to ask with next time. `rows` by worker."""

    store_id: str
    cursor: int
    rows: dict[str, list[Row]]


def rows_of(records: Iterable[StepRecord], now_s: float) -> list[Row]:
    """Rows of the settled steps. `now_s` is on the clock of the records: rows carry ages, since the clocks of two
    machines differ."""
    return [_row(record, now_s) for record in records if record.duration_s is not None]


def _row(record: StepRecord, now_s: float) -> Row:
    assert record.duration_s is not None
    age_ms = max(0.0, now_s - record.time_s - record.duration_s) * 1e3
    chunks = [[chunk.request_id, chunk.end - chunk.start] for chunk in record.prefill_chunks[:MAX_CHUNKS]]
    return [
        *(record.step_id, round(age_ms, 3), round(record.duration_s * 1e3, 3)),
        *(record.num_decodes, record.num_prefill_tokens, record.max_num_batched_tokens),
        *(record.num_waiting, record.num_running, record.num_swapped, record.num_device_blocks_used),
        *(len(record.preemptions), record.waiting_reason or "", chunks),
        *(record.num_blocks_swapped_out, record.num_blocks_swapped_in),
    ]


class StepFeed:
    """Thread-safe. `now_ms` of both verbs is on the clock that is shown to the page."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[str, deque[tuple[int, Row]]] = {}
        self._cursor = 0
        self._store_id = uuid4().hex

    def add(self, worker: str, rows: list[Row], now_ms: float) -> None:
        """Rows from `rows_of`, oldest first. ValueError: they are not of this version's form."""
        if any(len(row) != len(FIELDS) for row in rows):
            raise ValueError("the rows do not have the fields of this feed: is another version running?")
        with self._lock:
            kept = self._rows.pop(worker, None)
            if kept is None:
                kept = deque(maxlen=MAX_STEPS)
            self._rows[worker] = kept  # the one that reported last stands last
            late_ms = _lateness_ms(kept, rows, now_ms)
            for row in rows:
                ended_ms = round(now_ms - _ended_ms(row) + late_ms, 3)
                self._cursor += 1
                kept.append((self._cursor, [*row[:_ENDED], ended_ms, *row[_ENDED + 1 :]]))
            while len(self._rows) > MAX_WORKERS:
                del self._rows[next(iter(self._rows))]

    def since(self, cursor: int, store_id: str) -> StepBatch:
        """What came after `cursor` in the store of that id; everything for another id."""
        with self._lock:
            after = cursor if store_id == self._store_id else 0
            new = [(place, worker, row) for worker, kept in self._rows.items() for place, row in _newer(kept, after)]
            new.sort(key=lambda entry: entry[0])
            del new[:-MAX_ROWS]
            rows: dict[str, list[Row]] = {}
            for _, worker, row in new:
                rows.setdefault(worker, []).append(row)
            return {"store_id": self._store_id, "cursor": self._cursor, "rows": rows}

    def ended_since(self, ms: float) -> dict[str, list[Row]]:
        """Rows by worker, oldest first, of the steps that ended at `ms` or later on the clock of `now_ms`."""
        with self._lock:
            return {worker: [row for _, row in kept if _ended_ms(row) >= ms] for worker, kept in self._rows.items()}


def _lateness_ms(kept: deque[tuple[int, Row]], rows: list[Row], now_ms: float) -> float:
    """By how much these rows must be later, so that no step begins before the last one ended: one report takes longer
    on its way than another."""
    if not kept or not rows:
        return 0.0
    began_ms = now_ms - _ended_ms(rows[0]) - _duration_ms(rows[0])
    return max(0.0, _ended_ms(kept[-1][1]) - began_ms)


def _duration_ms(row: Row) -> float:
    value = row[_DURATION]
    assert isinstance(value, float)
    return value


def _ended_ms(row: Row) -> float:
    value = row[_ENDED]
    assert isinstance(value, float)
    return value


def _newer(kept: deque[tuple[int, Row]], after: int) -> list[tuple[int, Row]]:
    """The entries behind `after`, oldest first, without a walk over the others."""
    num_new = 0
    for place, _ in reversed(kept):
        if place <= after:
            break
        num_new += 1
    return list(islice(kept, len(kept) - num_new, None))
