"""Rows with restricted tokens: what is chosen, of what their log-probabilities are, and that others see nothing."""

import math
from dataclasses import replace

import pytest
import torch

from worker.sampled_rows import SampleRow
from worker.sampler import Sampler
from worker.types import SamplingParams

VOCAB_SIZE = 512
EOS = 7
GREEDY = SamplingParams(max_tokens=16, temperature=0.0)
RANDOM = SamplingParams(max_tokens=16, temperature=1.0)


def logits_of(num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(3)) * 3


def only(*token_ids: int) -> torch.Tensor:
    allowed = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    allowed[list(token_ids)] = True
    return allowed


def row(params: SamplingParams, allowed: torch.Tensor | None, logits_row: int = 0, position: int = 0) -> SampleRow:
    return SampleRow(logits_row, params, 0, position, [1, 2], [3], allowed)


def sample(logits: torch.Tensor, rows: list[SampleRow]) -> list[int]:
    return [token.token_id for token in Sampler(VOCAB_SIZE, {EOS}, "cpu").sample(logits, rows)]


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        RANDOM,
        replace(RANDOM, top_k=3),
        replace(RANDOM, top_p=0.4),
        replace(RANDOM, min_p=0.2),
        replace(RANDOM, temperature=1.7, top_k=100, top_p=0.99),
        replace(RANDOM, logit_bias=((5, 100.0),), repetition_penalty=1.3),
        replace(RANDOM, min_tokens=9),
    ],
)
def test_only_what_is_allowed_is_chosen(params: SamplingParams) -> None:
    logits = logits_of(1)
    logits[0, 40:] += 20.0  # all that is not allowed is far better
    allowed = only(0, 9, 33)
    rows = [row(replace(params, seed=seed), allowed) for seed in range(60)]
    assert set(sample(logits, rows)) <= {0, 9, 33}


def test_a_draw_follows_the_probabilities_among_what_is_allowed() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 20] = math.log(3.0)
    chosen = sample(logits, [row(RANDOM, only(20, 21), position=position) for position in range(2000)])
    assert set(chosen) == {20, 21}
    assert 0.71 < chosen.count(20) / len(chosen) < 0.79


def test_a_restricted_row_leaves_the_rows_beside_it_as_they_are() -> None:
    logits = logits_of(3)
    before = logits.clone()
    alone = sample(logits, [row(GREEDY, None, 0), row(RANDOM, None, 2)])
    beside = sample(logits, [row(GREEDY, None, 0), row(RANDOM, only(4), 1), row(RANDOM, None, 2)])
    assert [beside[0], beside[2]] == alone
    assert beside[1] == 4
    assert logits.equal(before)


def test_samples_of_one_row_of_logits_have_their_own_restrictions() -> None:
    assert sample(logits_of(1), [row(GREEDY, only(3)), row(GREEDY, only(8)), row(RANDOM, only(100))]) == [3, 8, 100]


def test_an_answer_that_can_only_end_ends_before_its_least_length() -> None:
    params = replace(GREEDY, min_tokens=10)
    assert sample(logits_of(1), [row(params, only(EOS))]) == [EOS]
    logits = logits_of(1)
    logits[0, EOS] = 50.0
    assert sample(logits, [row(params, only(EOS, 30))]) == [30]


def test_log_probabilities_are_of_what_is_allowed() -> None:
    logits = logits_of(1)
    (token,) = Sampler(VOCAB_SIZE, {EOS}, "cpu").sample(logits, [row(replace(GREEDY, logprobs=5), only(2, 11))])
    assert token.logprobs is not None
    own, best = token.logprobs
    expected = torch.log_softmax(logits[0, [2, 11]], dim=-1)
    assert own == pytest.approx(float(expected.max()), abs=1e-5)
    assert sorted(token_id for token_id, _ in best) == [2, 11], "what is not allowed is no alternative"
    assert sum(math.exp(logprob) for _, logprob in best) == pytest.approx(1.0, abs=1e-5)
