"""The few tokens that the kernels keep of a row lead to the token that the whole row leads to."""

import random
from dataclasses import replace

import pytest
import torch

from worker.candidates import CAPACITY, CandidateRow, Candidates
from worker.native.build import ensure_kernels
from worker.native.kernels import Kernels
from worker.noise import row_key
from worker.sampled_rows import SampleRow
from worker.sampler import Sampler
from worker.types import SamplingParams

VOCAB_SIZE = 20_011
ANY = SamplingParams(max_tokens=8)
CUTS = [
    {},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 3000},
    {"top_k": VOCAB_SIZE + 5},
    {"min_p": 0.05},
    {"min_p": 1e-9},
    {"top_k": 40, "top_p": 0.5},
    {"top_k": 500, "min_p": 0.2},
    {"top_p": 0.7, "min_p": 0.01},
    {"top_k": 30, "top_p": 0.95, "min_p": 0.02},
]


def logits_of(num_rows: int, spread: float, seed: int) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * spread


def kernel_candidates() -> Candidates:
    return Candidates(Kernels(ensure_kernels()))


#: from nearly certain to nearly level: the last keeps more tokens than there is room for
@pytest.mark.parametrize("spread", [8.0, 3.0, 1.0, 0.05])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_draw_from_the_few_is_the_draw_from_all(cut: dict, spread: float) -> None:
    draw = random.Random(str(cut))
    logits = logits_of(4, spread, 3)
    rows = []
    for number in range(24):
        params = replace(ANY, temperature=draw.choice([0.2, 0.7, 1.0, 1.7]), seed=draw.randrange(2**60), **cut)
        if number % 4 == 0:
            params = replace(params, repetition_penalty=1.3, logit_bias=((5, 4.0), (6, -100.0)))
        rows.append(SampleRow(number % 4, params, number % 3, draw.randrange(5000), [5, 9, 11], [11, 12]))
    sampler = Sampler(VOCAB_SIZE, (2,), "cpu")
    got = [token.token_id for token in sampler.sample(logits, rows)]
    assert got == sampler.decision_scores(logits, rows).argmax(dim=-1).tolist()


def test_most_rows_are_decided_by_the_few() -> None:
    logits = logits_of(1, 3.0, 5)[0]
    rows = [
        CandidateRow(logits, replace(ANY, **cut), row_key(seed, 0, 7))
        for cut in ({}, {"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.1})
        for seed in range(5)
    ]
    _, undecided = kernel_candidates().draw(rows)
    assert undecided == []


def test_a_row_that_is_not_finite_or_too_level_is_left_to_the_caller() -> None:
    level = torch.zeros(VOCAB_SIZE)
    assert VOCAB_SIZE > CAPACITY
    broken = logits_of(1, 3.0, 6)[0]
    broken[100] = torch.nan
    infinite = logits_of(1, 3.0, 6)[0]
    infinite[100] = torch.inf
    banned = logits_of(1, 3.0, 6)[0]
    banned[:100] = -torch.inf
    params = replace(ANY, top_p=0.5)
    _, undecided = kernel_candidates().draw(
        [CandidateRow(scores, params, 1) for scores in (level, broken, banned, infinite)]
    )
    assert undecided == [0, 1, 3]


def test_tokens_of_equal_score_go_to_the_lowest_id_as_without_the_kernels() -> None:
    logits = torch.full((1, VOCAB_SIZE), -5.0)
    logits[0, [77, 500, 12_000]] = 3.0
    rows = [SampleRow(0, replace(ANY, top_k=1, seed=seed), 0, 1, [], []) for seed in range(4)]
    rows += [SampleRow(0, replace(ANY, top_k=2, seed=seed), 0, 1, [], []) for seed in range(40)]
    got = [token.token_id for token in Sampler(VOCAB_SIZE, (), "cpu").sample(logits, rows)]
    assert got[:4] == [77] * 4
    assert set(got[4:]) == {77, 500}


def test_a_draw_does_not_depend_on_the_rows_beside_it() -> None:
    logits = logits_of(6, 2.0, 8)
    params = [replace(ANY, seed=seed, **CUTS[seed]) for seed in range(6)]
    rows = [SampleRow(number, params[number], 0, 40, [], []) for number in range(6)]
    sampler = Sampler(VOCAB_SIZE, (), "cpu")
    alone = [sampler.sample(logits, [row])[0].token_id for row in rows]
    assert [token.token_id for token in sampler.sample(logits, rows[::-1])][::-1] == alone


#: about the lengths that the kernel looks at together, and of a whole vocabulary
@pytest.mark.parametrize("vocab_size", [1, 15, 16, 17, 255, 256, 257, 512, 519, VOCAB_SIZE])
def test_the_best_token_is_the_lowest_of_the_greatest_wherever_it_lies(vocab_size: int) -> None:
    candidates = kernel_candidates()
    draw = random.Random(vocab_size)
    # More columns than tokens, as where the head is padded: they are greater, and nobody's.
    padded = torch.full((40, vocab_size + 9), 99.0)
    logits = padded[:, :vocab_size]
    # Few values, so that most rows have several best ones; zeros of both signs are equal.
    logits.copy_(torch.randint(-2, 2, logits.shape, generator=torch.Generator().manual_seed(3)).float().neg_())
    expected = []
    for row in range(len(logits)):
        first, second = sorted(draw.randrange(vocab_size) for _ in range(2))
        if row % 3 == 1:
            logits[row, first] = logits[row, second] = 7.0
        elif row % 3 == 2:
            logits[row, second] = torch.inf
        expected.append(logits[row].tolist().index(max(logits[row].tolist())))
    places = [*range(len(logits)), 3, 1]
    assert candidates.best(logits, places, -1).tolist() == [expected[place] for place in places]


def test_one_nan_anywhere_leaves_a_row_without_a_best_token_and_its_neighbours_with_theirs() -> None:
    for column in (0, 17, 300, VOCAB_SIZE // 256 * 256, VOCAB_SIZE - 1):
        logits = logits_of(3, 3.0, column)
        expected = logits.argmax(dim=-1).tolist()
        logits[1, column] = torch.nan
        logits[2, column] = -torch.inf
        assert kernel_candidates().best(logits, [0, 1, 2], -1).tolist() == [expected[0], -1, expected[2]]
    nothing = torch.full((1, VOCAB_SIZE), -torch.inf)
    assert kernel_candidates().best(nothing, [0], -1).tolist() == [-1]
