"""Steps as trace events: where they lie, what they say."""

from monitoring.chrome_trace import chrome_trace
from monitoring.step_feed import StepFeed, rows_of
from scheduler.records import ChunkRecord, PreemptionRecord, StepRecord


def feed_of(*records: StepRecord, worker: str = "0") -> StepFeed:
    feed = StepFeed()
    feed.add(worker, rows_of(records, now_s=10.0), now_ms=50_000.0)
    return feed


def record(step_id: int, begin_s: float, duration_s: float) -> StepRecord:
    return StepRecord(step_id, begin_s, 64, num_decodes=3, num_running=5, duration_s=duration_s)


def test_a_step_is_a_span_with_its_chunks_below_it_and_what_happened_in_it():
    step = record(4, 9.0, 0.25)
    step.prefill_chunks = [ChunkRecord("one", 0, 0, 32), ChunkRecord("two", 1, 16, 20)]
    step.num_prefill_tokens = 36
    step.preemptions = [PreemptionRecord("three", "swap", "blocks", "one", 2, 0, 0.0, 0.0)]
    step.num_blocks_swapped_out = 2
    trace = chrome_trace(feed_of(step).since(0, ""), now_ms=50_000.0, window_s=60.0)
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [span["name"] for span in spans] == ["step 4", "one", "two"]
    # One second before `now`, which is 50 s on the clock of the feed.
    assert {(span["ts"], span["dur"]) for span in spans} == {(49_000_000.0, 250_000.0)}
    assert [span["tid"] for span in spans] == [1, 2, 3]
    assert spans[1]["args"] == {"tokens": 32}
    instants = {event["name"]: event["args"]["number"] for event in trace["traceEvents"] if event["ph"] == "i"}
    assert instants == {"preempted": 1, "blocks swapped out": 2}
    counters = {event["name"]: event["args"] for event in trace["traceEvents"] if event["ph"] == "C"}
    assert counters["tokens"] == {"running answers": 3, "prompts": 36}
    assert counters["requests"]["running"] == 5


def test_only_the_window_is_in_it_and_each_worker_is_a_process():
    feed = feed_of(record(1, 1.0, 0.5), record(2, 9.0, 0.5))
    feed.add("10", rows_of([record(7, 9.0, 0.5)], 10.0), 50_000.0)
    feed.add("2", rows_of([record(8, 1.0, 0.5)], 10.0), 50_000.0)
    events = chrome_trace(feed.since(0, ""), now_ms=50_000.0, window_s=5.0)["traceEvents"]
    assert [event["name"] for event in events if event["ph"] == "X"] == ["step 2", "step 7"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["worker 0", "worker 10"]
