"""What is sent and when: arrivals, mixes, traces, prompts."""

import json
import math
import statistics
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.bench.arrivals import at_rate, mean_rate, synthetic_arrivals_s
from deployments.bench.mixes import LengthRange, MixPart, draw_parts, parse_lengths, parse_mix
from deployments.bench.prompts import PromptMaker
from deployments.bench.requests import PlannedRequest
from deployments.bench.traces import TraceError, TraceRecord, read_trace
from deployments.bench.workloads import SyntheticWorkload, TraceWorkload

# --- arrivals


@given(st.integers(2, 300), st.floats(0.01, 1000.0), st.sampled_from([0.2, 1.0, 5.0, math.inf]), st.integers(0, 99))
def test_arrivals_start_at_zero_rise_and_have_exactly_the_rate(
    count: int, rate: float, burstiness: float, seed: int
) -> None:
    arrivals = synthetic_arrivals_s(count, rate, burstiness, seed)
    assert len(arrivals) == count
    assert arrivals[0] == 0.0
    assert arrivals == sorted(arrivals)
    assert mean_rate(arrivals) == pytest.approx(rate)


def test_a_rate_stretches_the_pattern_and_leaves_it_as_it_is() -> None:
    slow, fast = (synthetic_arrivals_s(50, rate, 1.0, 7) for rate in (1.0, 8.0))
    assert slow == pytest.approx([arrival * 8.0 for arrival in fast])
    assert slow != synthetic_arrivals_s(50, 1.0, 1.0, 8)


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5), (math.inf, 0.0)])
def test_burstiness_sets_how_much_the_gaps_vary(burstiness: float, variation: float) -> None:
    arrivals = synthetic_arrivals_s(20_000, 3.0, burstiness, 0)
    gaps = [after - before for before, after in pairwise(arrivals)]
    assert statistics.pstdev(gaps) / statistics.mean(gaps) == pytest.approx(variation, abs=0.05)


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert synthetic_arrivals_s(3, math.inf, 1.0, 0) == [0.0, 0.0, 0.0]
    assert at_rate([5.0, 9.0], math.inf) == [0.0, 0.0]


def test_what_arrives_at_one_moment_cannot_be_stretched() -> None:
    with pytest.raises(ValueError, match="same moment"):
        at_rate([2.0, 2.0], 1.0)


# --- mixes


def test_a_mix_is_read_with_names_shares_and_ranges() -> None:
    assert parse_mix("chat:0.9@128/64, long:0.1@1000-4096/32") == [
        MixPart("chat", 0.9, LengthRange(128, 128), LengthRange(64, 64)),
        MixPart("long", 0.1, LengthRange(1000, 4096), LengthRange(32, 32)),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "name:share@input/output"),
        ("chat@128/64", "name:share@input/output"),
        ("chat:1@128", "name:share@input/output"),
        ("chat:0@128/64", "above 0"),
        ("chat:1.2.3@128/64", "must be a number"),
        ("chat:1@0/64", "at least 1"),
        ("chat:1@9-8/64", "rise"),
        ("a:1@1/1,a:1@2/2", "twice"),
    ],
)
def test_a_wrong_mix_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_mix(text)


@given(st.lists(st.floats(0.05, 5.0), min_size=1, max_size=5), st.integers(0, 200))
def test_each_part_of_a_mix_comes_as_often_as_its_share(shares: list[float], count: int) -> None:
    parts = [MixPart(str(n), share, LengthRange(1, 1), LengthRange(1, 1)) for n, share in enumerate(shares)]
    drawn = draw_parts(parts, count, Random(0))
    assert len(drawn) == count
    for part in parts:
        assert abs(drawn.count(part) - count * part.share / sum(shares)) <= len(parts)


def test_the_plan_of_a_mix_depends_on_the_seed_alone() -> None:
    parts = parse_mix("chat:3@10-20/5,long:1@100/7")
    first, again, other = (SyntheticWorkload(parts, seed, 40).plan(None, 2.0) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert [request.number for request in first] == list(range(40))
    assert sum(request.kind == "long" for request in first) == 10
    assert {request.num_input_tokens for request in first if request.kind == "chat"} <= set(range(10, 21))
    faster = SyntheticWorkload(parts, 1, 40).plan(None, 4.0)
    assert [r.num_input_tokens for r in faster] == [r.num_input_tokens for r in first]


def test_lengths_are_a_number_or_a_range() -> None:
    assert parse_lengths("7") == LengthRange(7, 7)
    assert {parse_lengths("2-4").draw(Random(n)) for n in range(50)} == {2, 3, 4}


# --- traces


def write(folder: Path, *lines: str) -> Path:
    path = folder / "trace"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_csv_trace_is_read_by_its_header_and_starts_at_zero(tmp_path: Path) -> None:
    path = write(tmp_path, "id,output_tokens,arrival_s,input_tokens", "a,7,12.5,100", "", "b,8,11.0,200")
    assert read_trace(path) == [TraceRecord(0.0, 200, 8), TraceRecord(1.5, 100, 7)]


def test_an_azure_trace_is_read_by_its_dates(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:46.6805900,374,44",
        "2023-11-16 18:15:50.9951690,396,109",
    )
    first, second = read_trace(path)
    assert (first.num_input_tokens, second.num_output_tokens) == (374, 109)
    assert second.arrival_s == pytest.approx(4.314579, abs=1e-5)


def test_mooncakes_lines_keep_their_shared_blocks(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        json.dumps({"timestamp": 1000, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]}),
        json.dumps({"timestamp": 3500, "input_length": 600, "output_length": 0, "hash_ids": [1, 3]}),
    )
    assert read_trace(path) == [TraceRecord(0.0, 700, 5, (1, 2)), TraceRecord(2.5, 600, 1, (1, 3))]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((), "is empty"),
        (("arrival_s,input_tokens,output_tokens",), "no request"),
        (("time,in,out", "1,2,3"), "line 1 must name the columns"),
        (("arrival_s,input_tokens,output_tokens", "0,1,2", "0.5,x,2"), "line 3"),
        (("arrival_s,input_tokens,output_tokens", "0,1"), "line 2"),
        (("arrival_s,input_tokens,output_tokens", "0,-1,2"), "line 2"),
        (("arrival_s,input_tokens,output_tokens", "nan,1,2"), "line 2"),
        (('{"timestamp": 1, "input_length": 2}',), "line 1: 'output_length' is missing"),
        (('{"timestamp": 1, "input_length": null, "output_length": 2}',), "line 1"),
        (('{"timestamp": 1, "input_length": 2, "output_length": 2}', "[]"), "line 2"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(tmp_path: Path, lines: tuple[str, ...], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_trace(write(tmp_path, *lines))


def test_a_trace_is_scaled_fixed_stretched_and_cut() -> None:
    records = [TraceRecord(0.0, 1000, 9), TraceRecord(2.0, 3, 500), TraceRecord(8.0, 50, 1)]
    trace = TraceWorkload("t", records, scale_input=0.25, fix_output=64, stretch=2.0)
    assert [(r.arrival_s, r.num_input_tokens, r.num_output_tokens) for r in trace.plan(None, None)] == [
        (0.0, 250, 64),
        (4.0, 1, 64),
        (16.0, 12, 64),
    ]
    assert trace.own_rate == pytest.approx(2 / 16)
    assert [r.arrival_s for r in trace.plan(None, 1.0)] == pytest.approx([0.0, 0.5, 2.0])
    assert len(trace.plan(2, None)) == 2
    assert len(trace.plan(99, None)) == 3


# --- prompts


def planned(number: int, length: int, keys: tuple[int, ...] = ()) -> PlannedRequest:
    return PlannedRequest(number, 0.0, length, 1, prefix_keys=keys)


def test_prompts_have_the_length_avoid_the_vocabularys_ends_and_differ_between_runs() -> None:
    maker = PromptMaker(vocab_size=1000, seed=3, prefix_block_tokens=512)
    prompt = maker.token_ids(planned(0, 5000), run=1)
    assert len(prompt) == 5000
    assert min(prompt) >= 100
    assert max(prompt) < 900
    assert prompt == maker.token_ids(planned(0, 5000), run=1)
    for other in (maker.token_ids(planned(0, 5000), run=2), maker.token_ids(planned(1, 5000), run=1)):
        assert prompt[:16] != other[:16]


def test_requests_that_share_blocks_in_a_trace_share_their_first_tokens() -> None:
    maker = PromptMaker(vocab_size=1000, seed=0, prefix_block_tokens=10)
    one = maker.token_ids(planned(0, 25, (5, 6)), run=1)
    two = maker.token_ids(planned(1, 35, (5, 7, 8)), run=1)
    assert (len(one), len(two)) == (25, 35)
    assert one[:10] == two[:10]
    assert one[10:20] != two[10:20]
    assert maker.token_ids(planned(2, 7, (5, 6)), run=1) == one[:7]


def test_a_text_prompt_has_a_word_for_each_token() -> None:
    text = PromptMaker(5000, 0, 512).text(planned(0, 40), run=0)
    assert len(text.split()) == 40
    assert len(set(text.split())) > 20
