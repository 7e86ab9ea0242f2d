"""An oracle that excuses everything proves nothing: what the margin rule lets pass, and what it does not."""

from collections.abc import Callable

import pytest

from tests.oracle.compare import NEAR_TIE_MARGIN, compare_answers
from tests.oracle.conftest import OracleModel
from tests.oracle.prompts import tiny_prompts
from tests.oracle.reference import ReferenceAnswer, chosen_answer, greedy_answer
from tests.tiny_models import load_reference
from worker.types import SamplingParams

pytestmark = pytest.mark.oracle

ANSWER = ReferenceAnswer([7, 8, 9], [1.0, NEAR_TIE_MARGIN, 1.0])


def test_equal_answers_pass_and_are_counted() -> None:
    comparison = compare_answers([ANSWER, ANSWER], [[7, 8, 9], [7, 8, 9]])
    comparison.check()
    assert (comparison.num_equal, comparison.num_tokens, comparison.num_close_decisions) == (2, 6, 2)


def test_a_difference_with_a_large_margin_is_a_fault() -> None:
    comparison = compare_answers([ANSWER, ANSWER], [[7, 8, 9], [7, 8, 1]])
    assert [(fault.sequence, fault.place, fault.margin) for fault in comparison.faults] == [(1, 2, 1.0)]
    with pytest.raises(AssertionError, match="1 of 2 sequences differ"):
        comparison.check()


def test_a_margin_just_over_the_limit_excuses_nothing() -> None:
    answer = ReferenceAnswer([7], [NEAR_TIE_MARGIN * 1.01])
    assert compare_answers([answer], [[1]]).faults


def test_a_near_tie_is_excused_once_and_ends_the_comparison_of_its_sequence() -> None:
    comparison = compare_answers([ANSWER], [[7, 1, 1]])
    comparison.check()
    assert (len(comparison.near_ties), comparison.num_equal, comparison.num_tokens) == (1, 0, 1)


def test_only_the_first_difference_of_a_sequence_can_be_excused() -> None:
    assert compare_answers([ANSWER], [[1, 1, 9]]).faults


def test_near_ties_of_more_than_one_sequence_in_a_hundred_fail() -> None:
    right, tied = [7, 8, 9], [7, 1, 9]
    compare_answers([ANSWER] * 200, [tied] * 2 + [right] * 198).check()
    with pytest.raises(AssertionError, match="3 near ties of 200"):
        compare_answers([ANSWER] * 200, [tied] * 3 + [right] * 197).check()
    with pytest.raises(AssertionError, match="2 near ties of 40"):
        compare_answers([ANSWER] * 40, [tied] * 2 + [right] * 38).check()


@pytest.mark.parametrize("got", [[7, 8], [7, 8, 9, 9], []])
def test_an_answer_of_another_length_is_a_fault(got: list[int]) -> None:
    assert compare_answers([ANSWER], [got]).faults


def test_a_guess_decides_nothing(tiny_model: Callable[[str], OracleModel]) -> None:
    model = load_reference(tiny_model("llama").folder)
    prompt, sampled = tiny_prompts([20])[0], SamplingParams(max_tokens=12, temperature=1.0, seed=3)
    for answer_with in (
        lambda guess: greedy_answer(model, prompt, 12, guess=guess),
        lambda guess: chosen_answer(model, prompt, sampled, guess=guess),
    ):
        plain = answer_with(())
        right = plain.token_ids
        wrong = [token_id ^ 1 for token_id in right]
        for guess in (right, right[:5], wrong, [*right[:7], *wrong[7:]], [*right[:11], wrong[11]], [*right, 9]):
            guessed = answer_with(guess)
            assert guessed.token_ids == right
            assert guessed.margins == pytest.approx(plain.margins, abs=1e-4)
