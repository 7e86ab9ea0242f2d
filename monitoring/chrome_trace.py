"""A window of steps in Chrome's trace event format, which Perfetto and chrome://tracing draw.

Source: the "Trace Event Format" document; `ph` X are complete events, C counters, i instants, M names. Times are
microseconds. Owns what is drawn where; knows neither HTTP nor who keeps the steps.
"""

from typing import Any

from monitoring.step_feed import FIELDS, MAX_CHUNKS, StepBatch

Event = dict[str, Any]

#: lanes of one worker
_STEPS, _FIRST_CHUNK = 1, 2


def chrome_trace(steps: StepBatch, now_ms: float, window_s: float) -> dict[str, Any]:
    """The steps that ended at most `window_s` before `now_ms`, a process for each worker, chunks below their steps."""
    events: list[Event] = []
    for pid, worker in enumerate(sorted(steps["rows"], key=int), start=1):
        rows: list[dict[str, Any]] = [dict(zip(FIELDS, row, strict=True)) for row in steps["rows"][worker]]
        rows = [values for values in rows if now_ms - values["ended_ms"] <= window_s * 1e3]
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
