"""Steps as trace events: where they lie, what they say."""

from monitoring.chrome_trace import Life, chrome_trace
from monitoring.step_feed import Row, StepFeed, rows_of
from scheduler.records import ChunkRecord, PreemptionRecord, StepRecord


def rows(*records: StepRecord) -> dict[str, list[Row]]:
    feed = StepFeed()
    feed.add("0", rows_of(records, now_s=10.0), now_ms=50_000.0)
    return feed.ended_since(0.0)


def record(step_id: int, begin_s: float, duration_s: float) -> StepRecord:
    return StepRecord(step_id, begin_s, 64, num_decodes=3, num_running=5, duration_s=duration_s)


def test_a_step_is_a_span_with_its_chunks_below_it_and_what_happened_in_it():
    step = record(4, 9.0, 0.25)
    step.prefill_chunks = [ChunkRecord("one", 0, 0, 32), ChunkRecord("two", 1, 16, 20)]
    step.num_prefill_tokens = 36
    step.preemptions = [PreemptionRecord("three", "swap", "blocks", "one", 2, 0, 0.0, 0.0)]
    step.num_blocks_swapped_out = 2
    trace = chrome_trace(rows(step), [])
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


def test_each_worker_is_a_process():
    steps = {"10": rows(record(7, 9.0, 0.5))["0"], "2": rows(record(8, 9.0, 0.5))["0"], "3": []}
    events = chrome_trace(steps, [])["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["worker 2", "worker 10"]
    assert [event["name"] for event in events if event["ph"] == "X"] == ["step 8", "step 7"]


def test_a_request_is_a_span_with_the_parts_of_its_time_one_after_the_other():
    life = Life("cmpl-1", 49_000.0, [["queue", "blocks", 30.0], ["prefill", "", 20.0]])
    events = chrome_trace({}, [life])["traceEvents"]
    spans = [(event["name"], event["ph"], event["ts"]) for event in events if event["ph"] in "be"]
    assert spans == [
        ("cmpl-1", "b", 48_950_000.0),
        ("queue", "b", 48_950_000.0),
        ("queue", "e", 48_980_000.0),
        ("prefill", "b", 48_980_000.0),
        ("prefill", "e", 49_000_000.0),
        ("cmpl-1", "e", 49_000_000.0),
    ]
    assert {event["id"] for event in events if event["ph"] in "be"} == {"cmpl-1"}
