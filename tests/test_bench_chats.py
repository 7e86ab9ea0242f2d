"""Chats beside long prompts, on a virtual clock: what is asked, what is cut, and what the chats saw."""

import asyncio
from dataclasses import dataclass, replace

import pytest

from deployments.bench.chats import ChatsWorkload, drive_chats
from deployments.bench.chats_summary import ChatsSummary, summarize_chats
from deployments.bench.comparison import COMPARED_CHATS, UnequalAnswersError, compare
from deployments.bench.driver import LEAD_S, Run
from deployments.bench.mixes import LengthRange
from deployments.bench.report import comparison_table, detail
from deployments.bench.requests import Answer, PlannedRequest
from deployments.bench.session import SETTLED, Measured, Session, SessionSettings
from deployments.bench.slo import Slo
from deployments.bench.summary import summarize
from tests.fake_bench_target import OneAtATime, PacedTarget
from tests.virtual_time import run_virtually

#: 8 chats whose answers take 0.1 + 9 x 0.02 s, long prompts at 5, 10 and 15 s
SHORT = ChatsWorkload(duration_s=20.0, chat_output_tokens=LengthRange(10, 10), chats_begin_within_s=0.0)


def driven(target: PacedTarget, workload: ChatsWorkload = SHORT) -> Run:
    return run_virtually(drive_chats(target, workload, run_number=3, timeout_s=100.0))


def of_kind(run: Run, kind: str) -> list[Answer]:
    return [answer for answer in run.answers if answer.request.kind == kind]


def seen(run: Run) -> ChatsSummary:
    found = summarize(run, Slo()).chats
    assert found is not None
    return found


def test_each_chat_asks_again_when_its_answer_has_ended_until_the_run_is_over() -> None:
    run = driven(PacedTarget())
    assert run.duration_s == pytest.approx(20.0)
    chats = of_kind(run, "chat")
    turn_s = 0.1 + 9 * 0.02
    assert len(chats) == 8 * (int(20.0 / turn_s) + 1)
    assert sum(answer.cut_s is not None for answer in chats) == 8
    assert {round(answer.request.arrival_s / turn_s, 6) for answer in chats} == set(range(int(20.0 / turn_s) + 1))
    assert len({answer.request.number for answer in run.answers}) == len(run.answers)


def test_long_prompts_leave_at_their_moments_and_have_an_interval_to_be_answered() -> None:
    run = driven(PacedTarget(ttft_s=4.9, gap_s=0.001))
    long = of_kind(run, "long")
    assert [answer.intended_s - run.started_s for answer in long] == pytest.approx([5.0, 10.0, 15.0])
    assert [answer.sent_s for answer in long] == pytest.approx([answer.intended_s for answer in long])
    assert all(answer.is_complete for answer in long)
    assert {answer.request.num_input_tokens for answer in long} == {1900}


def test_chats_begin_one_after_the_other_with_lengths_that_the_seed_draws() -> None:
    ranges = ChatsWorkload(chat_input_tokens=LengthRange(10, 90), chat_output_tokens=LengthRange(5, 50))
    chats = of_kind(driven(PacedTarget(), ranges), "chat")
    firsts = sorted(chats, key=lambda answer: answer.request.number)[:8]
    assert [answer.request.arrival_s for answer in firsts] == pytest.approx([0.25 * number for number in range(8)])
    assert len({answer.request.num_input_tokens for answer in chats}) > 20
    assert ranges.chat_request(3, 2, 0.0) == replace(ranges, num_chats=8).chat_request(3, 2, 0.0)
    assert ranges.chat_request(3, 2, 0.0) != replace(ranges, seed=1).chat_request(3, 2, 0.0)
    assert "10-90 in / 5-50 out" in ranges.describe()


def test_what_a_chat_asks_is_the_same_for_a_fast_and_a_slow_target() -> None:
    fast, slow = PacedTarget(), PacedTarget(ttft_s=1.5)
    asked = [[number for _, number in target.calls] for target in (fast, slow) if driven(target)]
    assert len(asked[0]) > len(asked[1])
    assert set(asked[1]) < set(asked[0])


def test_a_cut_answer_neither_failed_nor_is_it_complete_and_its_last_silence_counts() -> None:
    @dataclass
    class Stalling(PacedTarget):
        """One answer stops for good in its middle."""

        async def ask(self, answer: Answer, run: int) -> None:
            if answer.request.number == 2:
                answer.delivery_times_s.append(asyncio.get_running_loop().time())
                await asyncio.sleep(1000.0)
            await super().ask(answer, run)

    target = Stalling()
    run = driven(target)
    assert 2 in target.cancelled or run.answers
    summary = summarize(run, Slo())
    assert summary.num_failed == 0
    assert summary.num_unfinished == 8
    assert seen(run).itl.max == pytest.approx(20.0, abs=0.01)
    assert seen(run).longest_silence_s == pytest.approx(20.0, abs=0.01)


def test_a_server_of_one_chat_after_the_other_is_level_and_silent() -> None:
    found = seen(driven(OneAtATime(service_s=0.5, gap_s=0.02)))
    assert found.itl.p99 == pytest.approx(0.02)
    assert found.longest_silence_s == pytest.approx(8 * 0.5 - 9 * 0.02, abs=0.5)


def test_chats_whose_requests_fail_ask_no_more() -> None:
    target = PacedTarget(failing=frozenset(range(16)))
    run = driven(target)
    assert len(of_kind(run, "chat")) == 8
    assert run.duration_s < 20.0
    assert summarize(run, Slo()).num_failed == 8 + 3


def answer_of(kind: str, intended_s: float, *times_s: float, cut_s: float | None = None) -> Answer:
    answer = Answer(PlannedRequest(0, intended_s, 1, 1, kind), intended_s, intended_s, list(times_s), cut_s=cut_s)
    answer.num_output_tokens = len(times_s)
    return answer


def test_inter_token_times_beside_a_long_prompt_are_those_that_touch_its_wait() -> None:
    chat = answer_of("chat", 0.0, 1.0, 2.0, 3.5, 4.0, 6.0, 7.0, cut_s=10.0)
    long = [answer_of("long", 2.5, 3.75, 5.0), answer_of("long", 8.0, cut_s=10.0)]
    found = summarize_chats([chat, *long], 10.0, stall_threshold_s=1.75)
    assert (found.itl.count, found.itl.max) == (6, 3.0)
    # from 2 to 3.5 and 3.5 to 4 the first one waits, from 7 to the cut the second
    assert (found.itl_beside.count, found.itl_beside.p50, found.itl_beside.max) == (3, 1.5, 3.0)
    assert found.num_stalls == 2
    assert found.long_ttft.max == 1.25
    assert (found.num_long, found.num_long_unanswered) == (2, 1)
    assert found.tokens_per_s == pytest.approx(0.6)


def test_a_chat_that_never_got_a_token_was_silent_all_the_time() -> None:
    found = summarize_chats([answer_of("chat", 1.0, cut_s=9.0)], 9.0, None)
    assert found.longest_silence_s == 8.0
    assert found.itl.p50 is None


def compared(targets: list[PacedTarget], turns: list[str] | None = None) -> list[list[Measured]]:
    async def on_turn(name: str) -> None:
        if turns is not None:
            turns.append(name)

    session = Session(SessionSettings(SHORT, Slo(), None, 100.0, 2), on_turn=on_turn)
    return run_virtually(session.compare(targets, None, 2))


def test_targets_are_compared_by_what_chats_saw_and_each_is_settled_before_the_next() -> None:
    targets = [PacedTarget(name="a"), PacedTarget(name="b", gap_s=0.04)]
    turns: list[str] = []
    rounds = compared(targets, turns)
    assert turns == ["a", "b", "b", "a"]
    columns = compare([[one.summary for one in of_target] for of_target in rounds])
    assert set(columns[1].medians) == set(COMPARED_CHATS)
    assert columns[1].ratios["chats_itl_p99_s"] == pytest.approx(2.0)
    assert columns[0].medians["long_ttft_p50_s"] == pytest.approx(0.1)
    table = comparison_table(columns)
    assert "chats_itl_beside_long_p99 ms" in table
    assert "40.0 (2.00x)" in table
    assert [number for _, number in targets[0].calls].count(SETTLED.number) == 2 * 2
    text = detail(rounds[0][0].summary, Slo())
    assert "long prompts: 3 of 3 answered" in text


def test_a_target_whose_answers_are_shorter_ends_a_comparison_by_name() -> None:
    class EndingEarly(PacedTarget):
        async def ask(self, answer: Answer, run: int) -> None:
            await super().ask(answer, run)
            answer.num_output_tokens -= 1

    with pytest.raises(UnequalAnswersError, match=r"early: \d+ of \d+ answers are shorter") as raised:
        compared([PacedTarget(), EndingEarly(name="early")])
    assert raised.value.target == "early"
    session = Session(SessionSettings(SHORT, Slo(), None, 100.0, 1))
    with pytest.raises(UnequalAnswersError):
        run_virtually(session.warm_up(EndingEarly(name="early"), equal=True))
    run_virtually(session.warm_up(EndingEarly(name="early")))


def test_a_run_starts_after_its_lead() -> None:
    assert driven(PacedTarget()).started_s == pytest.approx(LEAD_S)
