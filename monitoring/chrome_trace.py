"""A window of steps and of requests' lives in Chrome's trace event format, which Perfetto and chrome://tracing draw.

Source: the "Trace Event Format" document. `ph` X are complete events, b and e the begin and end of nestable
asynchronous ones, C counters, i instants, M names; times are microseconds. Owns what is drawn where; knows neither HTTP
nor who keeps the steps.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from monitoring.step_feed import FIELDS, MAX_CHUNKS, Row

Event = dict[str, Any]

#: lanes of one worker
_STEPS, _FIRST_CHUNK = 1, 2
#: the process that stands for all requests; workers come after it
_REQUESTS = 0


@dataclass(frozen=True, slots=True)
class Life:
    """A request that ended at `ended_ms`. `timeline`: [name, cause, milliseconds], one after the other."""

    request_id: str
    ended_ms: float
    timeline: list[list[Any]]


def chrome_trace(steps: Mapping[str, list[Row]], lives: Iterable[Life]) -> dict[str, Any]:
    """A process for each worker, whose `steps` are rows of `monitoring.step_feed`, chunks below their steps; and one
    for requests, each with the parts of its time below it."""
    events: list[Event] = []
    if requests := [event for life in lives for event in _life(life)]:
        events.append({"ph": "M", "pid": _REQUESTS, "name": "process_name", "args": {"name": "requests"}})
        events += requests
    for pid, worker in enumerate(sorted(steps, key=int), start=1):
        rows: list[dict[str, Any]] = [dict(zip(FIELDS, row, strict=True)) for row in steps[worker]]
        if rows:
            events += _names(pid, worker)
            events += [event for values in rows for event in _step(pid, values)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _names(pid: int, worker: str) -> list[Event]:
    lanes = {_STEPS: "steps"} | {_FIRST_CHUNK + place: f"prompt chunk {place + 1}" for place in range(MAX_CHUNKS)}
    process: Event = {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": f"worker {worker}"}}
    return [process] + [
        {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}
        for tid, name in lanes.items()
    ]


def _life(life: Life) -> list[Event]:
    begin_us = (life.ended_ms - sum(ms for _, _, ms in life.timeline)) * 1e3
    common: Event = {"pid": _REQUESTS, "tid": 1, "cat": "request", "id": life.request_id}
    begins: list[Event] = [common | {"ph": "b", "ts": begin_us, "name": life.request_id}]
    for name, cause, ms in life.timeline:
        end_us = begin_us + ms * 1e3
        begins.append(common | {"ph": "b", "ts": begin_us, "name": name, "args": {"cause": cause}})
        begins.append(common | {"ph": "e", "ts": end_us, "name": name})
        begin_us = end_us
    return [*begins, common | {"ph": "e", "ts": begin_us, "name": life.request_id}]


def _step(pid: int, values: dict[str, Any]) -> list[Event]:
    duration_us = values["duration_ms"] * 1e3
    begin_us = values["ended_ms"] * 1e3 - duration_us
    span: Event = {"ph": "X", "pid": pid, "ts": begin_us, "dur": duration_us}
    shown = {name: values[name] for name in FIELDS if name not in ("ended_ms", "duration_ms", "chunks")}
    events = [span | {"tid": _STEPS, "name": f"step {values['step_id']}", "args": shown}]
    for place, (request_id, num_tokens) in enumerate(values["chunks"]):
        events.append(span | {"tid": _FIRST_CHUNK + place, "name": request_id, "args": {"tokens": num_tokens}})
    counters = {
        "tokens": {"running answers": values["num_decodes"], "prompts": values["num_prefill_tokens"]},
        "requests": {name: values[f"num_{name}"] for name in ("running", "waiting", "swapped")},
        "KV blocks": {"held": values["num_blocks"]},
    }
    for name, args in counters.items():
        events.append({"ph": "C", "pid": pid, "ts": begin_us, "name": name, "args": args})
    happened = {
        "preempted": values["num_preemptions"],
        "blocks swapped out": values["num_blocks_swapped_out"],
        "blocks swapped in": values["num_blocks_swapped_in"],
    }
    for name, number in happened.items():
        if number:
            at = {"ph": "i", "pid": pid, "tid": _STEPS, "ts": begin_us, "s": "t"}
            events.append(at | {"name": name, "args": {"number": number}})
    return events
