"""What step records and explanations cost: the time to make and keep a record, and to fold it into what requests spent
their time on, over the decode step of the model that it describes.

Prints one JSON line. The record is that of a real step of the scheduler with so many running answers, made again with
the same calls; the step is the engine's own, at as many running answers. While records are folded, a request waits for
a slot and in each step one ends and one comes in, which is more than any running server sees.
"""

import json
import statistics
import time
from dataclasses import MISSING, fields, replace
from random import Random

from benchmarks.bench_scheduler import run, scheduler_with
from benchmarks.driving import drive
from benchmarks.options import BadValueError, Parser, count, run_program, whole_number
from scheduler import QueuePolicy
from scheduler.lives import Lives
from scheduler.records import ChunkRecord, StepRecord, StepRecordRing, WaitReason
from worker.config import EngineConfig
from worker.engine import Engine

NUM_RUNNING = 256
NUM_ROUNDS, NUM_RECORDS = 5, 200
RING_CAPACITY = 4096
#: what a record holds beside its lists
NUMBERS = tuple(field.name for field in fields(StepRecord) if field.default_factory is MISSING)
NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 16, 40
MAX_NUM_BATCHED_TOKENS = 2048


def make_again(record: StepRecord) -> StepRecord:
    """With the calls of a step in the making: ids one by one, then what is known at its end."""
    made = StepRecord(record.step_id, record.time_s, record.max_num_batched_tokens)
    for name in ("decode_request_ids", "admitted", "resumed", "ended"):
        request_ids = getattr(made, name)
        for request_id in getattr(record, name):
            request_ids.append(request_id)
    for chunk in record.prefill_chunks:
        made.prefill_chunks.append(replace(chunk))
    for preemption in record.preemptions:
        made.preemptions.append(replace(preemption))
    for name in NUMBERS:
        setattr(made, name, getattr(record, name))
    return made


def record_s(num_running: int) -> float:
    """The best of several rounds: noise only adds."""
    scheduler = scheduler_with(num_running, 0, QueuePolicy.FCFS)
    run(scheduler, 1)
    record = scheduler.records.newest
    assert record.num_decodes == num_running
    best_s = float("inf")
    for _ in range(NUM_ROUNDS):
        ring = StepRecordRing(RING_CAPACITY)
        began_s = time.thread_time()
        for number in range(NUM_RECORDS):
            ring.append(make_again(record))
            ring.since(number - 1)
        best_s = min(best_s, time.thread_time() - began_s)
    return best_s / NUM_RECORDS


def lives_s(num_running: int) -> float:
    """Of one step, an end and an arrival included; the best of several rounds."""
    scheduler = scheduler_with(num_running, 0, QueuePolicy.FCFS)
    run(scheduler, 1)
    record = scheduler.records.newest
    record.waiting_reason = WaitReason.SEQUENCE_SLOTS
    best_s = float("inf")
    for _ in range(NUM_ROUNDS):
        lives = Lives(is_fair=False)
        names = [f"r{number}" for number in range(num_running + 2 * NUM_RECORDS)]
        for name in names[:num_running]:
            lives.arrived(name, 0.0, NUM_PROMPT_TOKENS)
        chunks = [ChunkRecord(name, 0, 0, NUM_PROMPT_TOKENS, completes=True) for name in names[:num_running]]
        lives.settled(_with_chunks(record, chunks, 0), 0.1)
        coming = [_with_chunks(record, [ChunkRecord(name, 0, 0, NUM_PROMPT_TOKENS, completes=True)], number)
                  for number, name in enumerate(names[num_running : num_running + NUM_RECORDS])]  # fmt: skip
        lives.arrived(coming[0].prefill_chunks[0].request_id, 0.1, NUM_PROMPT_TOKENS)
        began_s = time.thread_time()
        for number, made in enumerate(coming):
            now_s = 0.2 + 0.1 * number
            lives.arrived(names[num_running + number + 1], now_s - 0.1, NUM_PROMPT_TOKENS, taken_in_s=now_s - 0.1)
            lives.settled(made, now_s)
            lives.report(made.prefill_chunks[0].request_id, now_s)
            lives.ended(names[number], now_s)
        best_s = min(best_s, time.thread_time() - began_s)
    return best_s / NUM_RECORDS


def _with_chunks(record: StepRecord, chunks: list[ChunkRecord], number: int) -> StepRecord:
    size = sum(chunk.end - chunk.start for chunk in chunks)
    return replace(
        record,
        step_id=number,
        prefill_chunks=chunks,
        num_prefill_tokens=size,
        num_batched_tokens=record.num_decodes + size,
        duration_s=0.1,
    )


def decode_step_s(model: str, num_threads: int | None, num_running: int) -> float:
    """The median step in which all of them decode. Raises BadValueError if there is none."""
    engine = Engine(
        EngineConfig(
            model=model,
            num_threads=num_threads,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            max_num_seqs=num_running,
            max_model_len=NUM_PROMPT_TOKENS + NUM_OUTPUT_TOKENS,
        )
    )
    drive(engine, [(NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS)] * num_running, num_running, Random(0))
    steps_s = [
        record.duration_s or 0.0
        for record in engine.records_since(-1)
        if record.num_decodes == num_running and not record.prefill_chunks
    ]
    if not steps_s:
        raise BadValueError(f"--running: {num_running} answers never decoded together here")
    return statistics.median(steps_s)


def main() -> None:
    parser = Parser("benchmarks.step_records", __doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--num-threads", type=count)
    parser.add_argument("--running", type=whole_number(1, MAX_NUM_BATCHED_TOKENS), default=NUM_RUNNING)
    args = parser.parse_args()
    with parser.refusing():
        step_s = decode_step_s(args.model, args.num_threads, args.running)
    making_s, folding_s = record_s(args.running), lives_s(args.running)
    line = {
        "running": args.running,
        "record_us": round(making_s * 1e6, 1),
        "explain_us": round(folding_s * 1e6, 1),
        "step_ms": round(step_s * 1e3, 1),
        "share": round((making_s + folding_s) / step_s, 6),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    run_program(main)
