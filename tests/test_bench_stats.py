"""Percentiles, service levels, stalls, the search for a capacity, comparisons, and what is printed of them."""

import asyncio
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.bench.capacity import Capacity, search_capacity
from deployments.bench.comparison import compare
from deployments.bench.driver import Run
from deployments.bench.loss_watch import LossWatch
from deployments.bench.report import capacity_text, comparison_table, detail, sweep_table
from deployments.bench.requests import Answer, PlannedRequest
from deployments.bench.slo import Slo
from deployments.bench.stats import percentile, percentiles
from deployments.bench.summary import Summary, summarize


def answer_of(
    number: int,
    times_s: list[float],
    *,
    intended_s: float = 0.0,
    error: str | None = None,
    kind: str = "",
    asked: int = 0,
) -> Answer:
    request = PlannedRequest(number, intended_s, 10, asked or len(times_s), kind)
    answer = Answer(request, intended_s, sent_s=intended_s, delivery_times_s=times_s, error=error)
    answer.num_input_tokens, answer.num_output_tokens = 10, len(times_s)
    answer.ended_s = times_s[-1] if times_s else intended_s
    return answer


def run_of(*answers: Answer, target: str = "t") -> Run:
    return Run(target, list(answers), 0.0, max(answer.ended_s or 0.0 for answer in answers), [0.001])


# --- percentiles


@given(st.lists(st.floats(0, 1e6), min_size=1), st.sampled_from([1.0, 50.0, 90.0, 99.0, 100.0]))
def test_a_percentile_is_the_smallest_value_that_enough_values_do_not_exceed(values: list[float], rank: float) -> None:
    found = percentile(values, rank)
    needed = len(values) * rank / 100.0
    assert sum(value <= found for value in values) >= needed
    assert sum(value < found for value in values) < needed


def test_p99_of_few_values_is_their_largest_and_of_none_is_nothing() -> None:
    assert percentiles([3.0, 1.0, 2.0]).p99 == 3.0
    assert percentiles(float(n) for n in range(1, 201)).p99 == 198.0
    assert percentiles([]).p50 is None


# --- service levels


def test_a_good_request_begins_in_time_and_keeps_the_pace() -> None:
    slo = Slo(ttft_s=1.0, itl_s=0.11)
    assert slo.is_good(answer_of(0, [1.0, 1.1, 1.15]))
    assert not slo.is_good(answer_of(0, [1.01, 1.1]))
    assert not slo.is_good(answer_of(0, [0.5, 0.7]))
    assert slo.is_good(answer_of(0, [0.5]))
    assert not slo.is_good(answer_of(0, [0.5, 0.6], error="broke"))
    assert Slo(ttft_s=1.0).is_good(answer_of(0, [0.5, 9.0]))


def test_one_late_token_in_a_hundred_is_still_good() -> None:
    even = [n / 100 for n in range(1, 201)]
    one_late = even[:100] + [time_s + 5.0 for time_s in even[100:]]
    assert Slo(itl_s=0.011).is_good(answer_of(0, one_late))
    assert not Slo(itl_s=0.011).is_good(answer_of(0, one_late[:50] + [t + 5.0 for t in one_late[50:]] + [99.0]))


def test_a_run_misses_its_level_by_errors_the_median_first_token_or_the_slowest_gaps() -> None:
    slo = Slo(ttft_s=1.0, itl_s=0.5)
    good, late, slow = answer_of(0, [1.0, 1.5]), answer_of(1, [1.1, 1.2]), answer_of(2, [0.1, 0.7])
    assert slo.miss([good]) is None
    assert slo.miss([good, late]) is None
    assert slo.miss([good, late, late]) == "ttft"
    assert slo.miss([good, slow]) == "itl"
    assert slo.miss([good, answer_of(3, [], error="gone")]) == "errors"
    assert slo.miss([good, Answer(good.request, 0.0)]) == "unfinished"


@given(
    st.lists(st.lists(st.floats(0.01, 3.0), min_size=1, max_size=8), min_size=1, max_size=8),
    st.floats(0.05, 2.0),
    st.floats(0.05, 2.0),
)
def test_what_is_lost_while_it_runs_is_missed_at_the_end(gaps: list[list[float]], ttft_s: float, itl_s: float) -> None:
    slo = Slo(ttft_s, itl_s)
    whole = [answer_of(n, [math.fsum(steps[: k + 1]) for k in range(len(steps))]) for n, steps in enumerate(gaps)]
    watch, lost = LossWatch(slo), None
    for tick in range(60):
        now = tick * 0.5
        partial = []
        for answer in whole:
            seen = [time_s for time_s in answer.delivery_times_s if time_s <= now]
            shown = Answer(answer.request, 0.0, 0.0, seen)
            shown.ended_s = seen[-1] if len(seen) == len(answer.delivery_times_s) else None
            partial.append(shown)
        lost = watch.lost(partial, now)
        if lost is not None:
            break
    assert lost is None or slo.miss(whole) is not None
    # With everything seen, nothing that is missed goes unnoticed.
    assert (lost is None) == (slo.miss(whole) is None)


# --- summaries


def test_stalls_are_counted_over_the_limit_or_five_times_the_median() -> None:
    times_s = [1.0, 1.1, 1.2, 1.3, 2.0, 2.1]
    by_median = summarize(run_of(answer_of(0, times_s)), Slo())
    assert by_median.stall_threshold_s == pytest.approx(0.5)
    assert by_median.num_stalls == 1
    assert summarize(run_of(answer_of(0, times_s)), Slo(itl_s=0.05)).num_stalls == 5
    assert summarize(run_of(answer_of(0, [1.0])), Slo()).stall_threshold_s is None


def test_kinds_of_a_mix_are_told_apart() -> None:
    run = run_of(answer_of(0, [1.0, 1.5], kind="chat"), answer_of(1, [3.0, 4.0], kind="long"))
    by_kind = summarize(run, Slo()).by_kind
    assert by_kind["chat"].ttft.max == 1.0
    assert by_kind["long"].itl.max == 1.0


def test_answers_shorter_than_asked_for_are_shown() -> None:
    summary = summarize(run_of(answer_of(0, [1.0, 1.5], asked=9), answer_of(1, [1.0])), Slo())
    assert summary.num_short == 1
    assert "shorter than asked 1" in detail(summary, Slo())


def test_a_summary_is_json() -> None:
    text = json.dumps(summarize(run_of(answer_of(0, [1.0, 1.5])), Slo(1.0, 1.0)).to_dict())
    fields = json.loads(text)
    assert fields["ttft_ms"]["p50"] == 1000.0
    assert fields["itl_ms"]["max"] == 500.0
    assert fields["num_good"] == 1


# --- capacity


class Server:
    """Keeps the level up to `limit` requests a second; each trial takes `trial_s` of a clock of its own."""

    def __init__(self, limit: float, trial_s: float = 1.0) -> None:
        self.limit, self.trial_s, self.now_s = limit, trial_s, 0.0

    async def measure(self, rate: float) -> str | None:
        self.now_s += self.trial_s
        return None if rate <= self.limit else "itl"

    def search(self, *, start_rate: float = 1.0, precision: float = 0.05, max_search_s: float = 1e9) -> Capacity:
        return asyncio.run(
            search_capacity(
                self.measure,
                start_rate=start_rate,
                precision=precision,
                max_search_s=max_search_s,
                clock=lambda: self.now_s,
            )
        )


@given(st.floats(0.06, 9000.0), st.floats(0.05, 10_000.0))
def test_the_search_encloses_the_capacity_wherever_it_starts(limit: float, start_rate: float) -> None:
    found = Server(limit).search(start_rate=start_rate)
    assert found.rate is not None
    assert found.lowest_miss is not None
    assert found.rate <= limit < found.lowest_miss <= found.rate * 1.05 * (1 + 1e-9)
    assert found.why_ended == "precision"
    assert len(found.trials) < 30


def test_a_server_that_keeps_the_level_at_no_rate_has_no_capacity() -> None:
    found = Server(0.04).search()
    assert (found.rate, found.why_ended) == (None, "min_rate")
    assert found.trials[-1].rate == 0.05
    assert "capacity none" in capacity_text("t", found, Slo(itl_s=1.0))


def test_a_server_without_a_limit_has_at_least_the_highest_rate() -> None:
    found = Server(math.inf).search()
    assert (found.rate, found.lowest_miss, found.why_ended) == (10_000.0, None, "max_rate")


def test_a_search_that_runs_out_of_time_says_so_and_has_tried_once() -> None:
    found = Server(100.0, trial_s=10.0).search(max_search_s=25.0)
    assert [trial.rate for trial in found.trials] == [1.0, 2.0, 4.0]
    assert (found.rate, found.why_ended) == (4.0, "time")
    assert "at least" in capacity_text("t", found, Slo(itl_s=1.0))
    assert len(Server(100.0, trial_s=10.0).search(max_search_s=1.0).trials) == 1


# --- comparison and text


def summary_of(target: str, gap_s: float) -> Summary:
    return summarize(run_of(answer_of(0, [gap_s, 2 * gap_s, 3 * gap_s]), target=target), Slo())


def test_ratios_are_medians_of_paired_rounds_not_ratios_of_medians() -> None:
    rounds = [[summary_of("a", 1.0), summary_of("a", 2.0), summary_of("a", 4.0)]]
    rounds.append([summary_of("b", 2.0), summary_of("b", 6.0), summary_of("b", 4.0)])
    first, second = compare(rounds)
    assert first.ratios["itl_p50_s"] == pytest.approx(1.0)
    assert second.ratios["itl_p50_s"] == pytest.approx(2.0)
    assert second.medians["itl_p50_s"] == pytest.approx(4.0)
    assert "4000.0 (2.00x)" in comparison_table([first, second])


def test_a_quantity_that_a_round_lacks_is_compared_with_nothing() -> None:
    failed = summarize(run_of(answer_of(0, [], error="gone"), target="b"), Slo())
    columns = compare([[summary_of("a", 1.0)], [failed]])
    assert columns[1].ratios["itl_p50_s"] is None
    assert columns[1].num_failed == 1
    assert "failed" in comparison_table(columns)


def test_tables_show_errors_and_the_clients_own_lateness() -> None:
    late = answer_of(0, [1.0, 1.5])
    late.sent_s = 0.4
    summary = summarize(run_of(late, answer_of(1, [], error="HTTP 500: no")), Slo(ttft_s=2.0))
    text = detail(summary, Slo(ttft_s=2.0))
    assert "error x 1: HTTP 500: no" in text
    assert "client itself was late" in text
    assert "1 of 2" in text
    row = sweep_table([summary, summary]).splitlines()[1]
    assert "1/2" in row
    assert "400.0" in row
