import math
import random
from dataclasses import replace

import pytest
import torch

from worker.device import CpuDevice, HostCopy
from worker.noise import CONTENDER_SLACK, gumbel, row_key
from worker.sampled_rows import LOGPROB_FLOOR, NO_TOKEN, SampledToken, SampleRow
from worker.sampler import NUM_SCORES_AT_ONCE, Sampler
from worker.score_edits import edit_scores
from worker.survivors import NUM_RANKED, survivor_mask
from worker.types import SamplingParams

VOCAB_SIZE = 512
EOS = 7
GREEDY = SamplingParams(max_tokens=16, temperature=0.0)
RANDOM = SamplingParams(max_tokens=16, temperature=1.0)


def make_sampler(vocab_size: int = VOCAB_SIZE) -> Sampler:
    return Sampler(vocab_size, {EOS}, "cpu")


def make_logits(num_rows: int, vocab_size: int = VOCAB_SIZE, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def make_row(params: SamplingParams, logits_row: int = 0, position: int = 0, **fields: object) -> SampleRow:
    values = {"sample_index": 0, "prompt_token_ids": [1, 2, 3], "output_token_ids": [], **fields}
    return SampleRow(logits_row=logits_row, params=params, position=position, **values)


def draw(logits: torch.Tensor, params: SamplingParams, num_draws: int) -> torch.Tensor:
    """Token ids drawn at `num_draws` positions from one row of logits."""
    rows = [make_row(params, position=position) for position in range(num_draws)]
    return torch.tensor([token.token_id for token in make_sampler(logits.shape[1]).sample(logits, rows)])


def ids(sampled: list[SampledToken]) -> list[int]:
    return [token.token_id for token in sampled]


# --- greedy


def test_greedy_rows_take_the_best_token() -> None:
    logits = make_logits(4)
    rows = [make_row(GREEDY, row) for row in (2, 0, 3)]
    assert ids(make_sampler().sample(logits, rows)) == logits.argmax(dim=-1)[[2, 0, 3]].tolist()


def test_ties_go_to_the_lowest_token_id_with_and_without_edits_and_cuts() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, [40, 41, 300]] = 5.0
    variants = [
        GREEDY,
        replace(GREEDY, logit_bias=((9, -1.0),)),
        replace(RANDOM, top_k=1),
        replace(RANDOM, top_p=0.0),
        replace(RANDOM, top_p=1e-4),
        replace(RANDOM, temperature=1e-6),
    ]
    assert ids(make_sampler().sample(logits, [make_row(params) for params in variants])) == [40] * 6


@pytest.mark.parametrize(
    "params",
    [
        replace(RANDOM, temperature=1e-4),
        replace(RANDOM, temperature=1e-6),
        replace(RANDOM, temperature=1e-30),
        replace(RANDOM, top_p=0.0),
        replace(RANDOM, top_p=1e-4),
        replace(RANDOM, top_k=1),
        replace(RANDOM, min_p=1.0),
    ],
)
def test_tiny_limits_are_as_greedy(params: SamplingParams) -> None:
    logits = make_logits(50)
    rows = [make_row(params, row, position=row) for row in range(50)]
    assert ids(make_sampler().sample(logits, rows)) == logits.argmax(dim=-1).tolist()


def test_logits_are_left_unchanged() -> None:
    logits = make_logits(2)
    before = logits.clone()
    biased = replace(RANDOM, logit_bias=((3, 9.0),), repetition_penalty=2.0, top_p=0.5, logprobs=3)
    make_sampler().sample(logits, [make_row(biased, 0), make_row(replace(GREEDY, min_tokens=3), 1)])
    assert torch.equal(logits, before)


def test_padding_columns_are_never_chosen_nor_reported() -> None:
    logits = make_logits(1, VOCAB_SIZE + 64)
    logits[0, VOCAB_SIZE:] = 100.0
    rows = [make_row(replace(params, logprobs=5)) for params in (GREEDY, RANDOM, replace(RANDOM, top_k=9))]
    for token in make_sampler().sample(logits, rows):
        assert token.token_id < VOCAB_SIZE
        assert token.logprobs is not None
        assert all(token_id < VOCAB_SIZE for token_id, _ in token.logprobs[1])


# --- independence


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=64,
        temperature=rng.choice([0.0, 0.0, 1e-4, 0.3, 1.0, 2.0]),
        top_p=rng.choice([0.0, 0.1, 0.9, 1.0, 1.0]),
        top_k=rng.choice([0, 0, 1, 5, 40, VOCAB_SIZE * 9]),
        min_p=rng.choice([0.0, 0.0, 0.05, 1.0]),
        seed=rng.randrange(2**64),
        logprobs=rng.choice([None, None, 0, 1, 5]),
        min_tokens=rng.choice([0, 0, 4]),
        stop_token_ids=rng.choice([(), (3, 9)]),
        ignore_eos=rng.random() < 0.3,
        presence_penalty=rng.choice([0.0, 0.0, 1.5]),
        frequency_penalty=rng.choice([0.0, 0.0, -1.5]),
        repetition_penalty=rng.choice([1.0, 1.0, 2.0]),
        logit_bias=rng.choice([(), ((4, 100.0),), ((5, -100.0), (6, 3.0))]),
    )


def test_a_row_gives_the_same_token_alone_and_in_any_batch_of_random_settings() -> None:
    rng = random.Random(1)
    sampler, logits = make_sampler(), make_logits(24)
    logits[12:] = logits[12:].bfloat16().float()  # equal scores, as bfloat16 models have them
    for _ in range(40):
        rows = [
            SampleRow(
                logits_row=rng.randrange(24),
                params=random_params(rng),
                sample_index=rng.randrange(3),
                position=rng.randrange(5000),
                prompt_token_ids=[rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 9))],
                output_token_ids=[rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(6))],
            )
            for _ in range(16)
        ]
        alone = [
            sampler.sample(logits[row.logits_row : row.logits_row + 1], [replace(row, logits_row=0)])[0] for row in rows
        ]
        together = sampler.sample(logits, rows)
        rng.shuffle(order := list(range(16)))
        shuffled = sampler.sample(logits, [rows[place] for place in order])
        assert ids(together) == ids(alone)
        assert ids(shuffled) == [alone[place].token_id for place in order]
        for one, other in zip(together, alone, strict=True):
            assert (one.logprobs is None) == (other.logprobs is None)
            if one.logprobs and other.logprobs:
                assert one.logprobs[0] == pytest.approx(other.logprobs[0], abs=1e-5)
                assert [pair[0] for pair in one.logprobs[1]] == [pair[0] for pair in other.logprobs[1]]


def test_a_seeded_row_ignores_the_seed_of_its_batch_mate() -> None:
    sampler, logits = make_sampler(), make_logits(2)
    seeded = make_row(replace(RANDOM, seed=42), 0, position=4)
    expected = sampler.sample(logits, [seeded])[0].token_id
    for seed in range(50):
        mate = make_row(replace(RANDOM, seed=seed), 1, position=4)
        assert sampler.sample(logits, [mate, seeded])[1].token_id == expected


def test_a_penalty_of_one_row_leaves_its_neighbour_alone_in_both_orders() -> None:
    sampler, logits = make_sampler(), make_logits(2)
    free = make_row(RANDOM, 0, output_token_ids=[5, 6])
    penalized = make_row(replace(GREEDY, repetition_penalty=2.0), 1, output_token_ids=[5, 6])
    alone = [sampler.sample(logits, [row])[0].token_id for row in (free, penalized)]
    assert ids(sampler.sample(logits, [free, penalized])) == alone
    assert ids(sampler.sample(logits, [penalized, free])) == alone[::-1]


def test_slices_of_a_large_batch_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, logits = make_sampler(), make_logits(20)
    params = [RANDOM, replace(RANDOM, top_p=0.8), replace(GREEDY, min_tokens=2)]
    rows = [make_row(params[row % 3], row, position=row) for row in range(20)]
    whole = ids(sampler.sample(logits, rows))
    monkeypatch.setitem(NUM_SCORES_AT_ONCE, "cpu", 3 * VOCAB_SIZE)
    assert ids(sampler.sample(logits, rows)) == whole


# --- draws


def test_draws_follow_the_softmax_by_a_chi_square_test() -> None:
    logits = make_logits(1, 12) / 3
    for temperature in (0.7, 1.0, 1.8):
        counts = draw(logits, replace(RANDOM, temperature=temperature), 20_000).bincount(minlength=12)
        assert_frequencies(counts, torch.softmax(logits[0].double() / temperature, dim=0))


def test_cut_draws_follow_the_softmax_of_the_survivors() -> None:
    logits = make_logits(1, 12) / 3
    mask = survivor_mask(logits, [5], [0.9], [0.05])[0]
    expected = torch.softmax(logits[0].double().masked_fill(~mask, -math.inf), dim=0)
    counts = draw(logits, replace(RANDOM, top_k=5, top_p=0.9, min_p=0.05), 20_000).bincount(minlength=12)
    assert counts[~mask].sum() == 0
    assert_frequencies(counts[mask], expected[mask])


def test_samples_of_one_row_are_independent_draws() -> None:
    logits = torch.zeros(1, 4)
    rows = [make_row(RANDOM, position=p, sample_index=s) for p in range(8000) for s in (0, 1)]
    pairs = torch.tensor(ids(make_sampler(4).sample(logits, rows))).view(-1, 2)
    counts = (pairs[:, 0] * 4 + pairs[:, 1]).bincount(minlength=16)
    assert_frequencies(counts, torch.full((16,), 1 / 16, dtype=torch.float64))


def full_pass(logits: torch.Tensor, rows: list[SampleRow]) -> torch.Tensor:
    """Scores of temperature-1 rows with the noise of every token."""
    keys = torch.tensor([row_key(row.params.seed, row.sample_index, row.position) for row in rows])
    scores = logits[[row.logits_row for row in rows]]
    return scores + gumbel(keys.unsqueeze(1), torch.arange(logits.shape[1]))


def test_noise_for_the_survivors_alone_gives_what_a_full_pass_gives() -> None:
    sampler, logits = make_sampler(), make_logits(30)
    cut = replace(RANDOM, top_k=20, top_p=0.95)
    rows = [make_row(cut, row, position=row) for row in range(30)]
    mask = survivor_mask(logits, [20] * 30, [0.95] * 30, [0.0] * 30)
    expected = full_pass(logits, rows).masked_fill(~mask, -math.inf)
    assert torch.equal(sampler.decision_scores(logits, rows), expected)
    assert ids(sampler.sample(logits, rows)) == expected.argmax(dim=-1).tolist()


@pytest.mark.parametrize("scale", [0.0, 0.3, 3.0, 40.0])
def test_noise_for_the_contenders_alone_gives_what_a_full_pass_gives(scale: float) -> None:
    vocab_size, num_rows = 20_000, 60
    sampler, logits = make_sampler(vocab_size), make_logits(num_rows, vocab_size) / 3 * scale
    logits[::2, 100:] -= 1000.0
    logits[1::4, ::3] = -math.inf
    rows = [make_row(RANDOM, row, position=row) for row in range(num_rows)]
    expected, scores = full_pass(logits, rows), sampler.decision_scores(logits, rows)
    assert ids(sampler.sample(logits, rows)) == expected.argmax(dim=-1).tolist()
    near = expected >= expected.amax(dim=-1, keepdim=True) - CONTENDER_SLACK
    assert torch.equal(scores[near], expected[near])
    kept = scores > -math.inf
    assert torch.equal(scores[kept], expected[kept])


def test_where_nothing_is_counted_on_the_host_the_noise_of_every_token_chooses_the_same() -> None:
    sampler, logits = make_sampler(), make_logits(40)
    variants = [RANDOM, replace(RANDOM, top_k=20, top_p=0.9), replace(RANDOM, min_p=0.05), replace(RANDOM, top_p=0.7)]
    rows = [make_row(replace(variants[row % 4], temperature=0.5 + row / 40), row, position=row) for row in range(40)]
    expected = ids(sampler.sample(logits, rows))
    sampler._candidates = None
    assert ids(sampler.sample(logits, rows)) == expected
    sampler._looks_for_contenders = False
    assert ids(sampler.sample(logits, rows)) == expected


def test_tokens_and_log_probabilities_of_all_rows_reach_the_host_in_one_copy() -> None:
    copies: list[torch.Tensor] = []

    class CountingDevice(CpuDevice):
        def to_host(self, tensor: torch.Tensor) -> HostCopy:
            copies.append(tensor)
            return super().to_host(tensor)

    sampler, logits = make_sampler(), make_logits(6)
    params = [GREEDY, replace(RANDOM, logprobs=2), replace(RANDOM, logprobs=0), replace(GREEDY, logprobs=2), RANDOM]
    rows = [make_row(each, row) for row, each in enumerate(params)]
    expected = sampler.sample(logits, rows)
    sampler._device = CountingDevice()
    assert sampler.sample(logits, rows) == expected
    assert len(copies) == 1
    assert [None if token.logprobs is None else len(token.logprobs[1]) for token in expected] == [None, 2, 0, 2, None]


@pytest.mark.parametrize(
    "params", [RANDOM, replace(RANDOM, top_p=0.9), replace(RANDOM, logit_bias=((3, 1.0),)), GREEDY]
)
def test_rows_without_a_number_to_choose_by_give_no_token_and_leave_the_others_alone(params: SamplingParams) -> None:
    logits = make_logits(5)
    expected = ids(make_sampler().sample(logits, [make_row(params, row) for row in range(5)]))
    logits[0, 77] = math.inf
    logits[1] = -math.inf
    logits[2] = math.nan
    logits[3, 5] = math.nan
    found = ids(make_sampler().sample(logits, [make_row(params, row) for row in range(5)]))
    assert found == [77, NO_TOKEN, NO_TOKEN, NO_TOKEN, expected[4]]


def test_seeded_draws_have_golden_values() -> None:
    logits = (torch.arange(VOCAB_SIZE) * 37 % 101 / 20.0).unsqueeze(0)
    rows = [make_row(replace(RANDOM, seed=1234), position=position) for position in range(8)]
    assert ids(make_sampler().sample(logits, rows)) == [23, 106, 296, 246, 150, 494, 412, 423]


# --- top-k, top-p, min-p


def reference_mask(scores: torch.Tensor, top_k: int, top_p: float, min_p: float) -> list[bool]:
    """One row, in plain Python."""
    order = sorted(range(len(scores)), key=lambda token_id: (-scores[token_id].item(), token_id))
    order = order[: top_k or len(order)]
    best = scores[order[0]].item()
    masses = [math.exp(scores[token_id].item() - best) for token_id in order]
    kept, mass, total = set(), 0.0, sum(masses)
    for token_id, own in zip(order, masses, strict=True):
        if kept and top_p < 1 and mass >= top_p * total:
            break
        mass += own
        if not min_p or own >= min_p:
            kept.add(token_id)
    return [token_id in kept for token_id in range(len(scores))]


@pytest.mark.parametrize("vocab_size", [50, NUM_RANKED, NUM_RANKED * 3])
@pytest.mark.parametrize("scale", [0.01, 3.0])
def test_survivors_are_those_of_a_plain_loop(vocab_size: int, scale: float) -> None:
    rng = random.Random(vocab_size)
    scores = make_logits(30, vocab_size, seed=vocab_size) * scale
    scores[15:] = (scores[15:] * 4).round() / 4  # many equal scores
    top_k = [rng.choice([0, 1, 7, 49, NUM_RANKED, NUM_RANKED + 300, 10**9]) for _ in range(30)]
    top_p = [rng.choice([0.0, 0.2, 0.9, 0.999, 1.0]) for _ in range(30)]
    min_p = [rng.choice([0.0, 0.0, 0.0213]) for _ in range(30)]
    mask = survivor_mask(scores, top_k, top_p, min_p)
    for row in range(30):
        expected = reference_mask(scores[row], top_k[row], top_p[row], min_p[row])
        assert mask[row].tolist() == expected, (top_k[row], top_p[row], min_p[row])


def test_top_p_one_keeps_every_token_even_those_of_no_mass() -> None:
    scores = torch.tensor([[0.0, -500.0, -1000.0]])
    assert survivor_mask(scores, [0], [1.0], [0.0]).all()


def test_masked_scores_do_not_survive_a_wide_cut() -> None:
    scores = torch.full((1, 100), -math.inf)
    scores[0, [3, 50]] = torch.tensor([1.0, 2.0])
    rows = [make_row(replace(RANDOM, top_k=40, top_p=0.999), position=position) for position in range(200)]
    assert set(ids(make_sampler(100).sample(scores, rows))) == {3, 50}


# --- edits


def edited(params: SamplingParams, prompt: list[int], output: list[int], scores: torch.Tensor) -> torch.Tensor:
    scores = scores.clone()
    edit_scores(scores, params, prompt, output, {EOS})
    return scores


def test_repetition_penalty_sees_prompt_and_output_once_each() -> None:
    scores = torch.tensor([2.0, -2.0, 2.0, -2.0, 1.0])
    result = edited(replace(GREEDY, repetition_penalty=2.0), [0, 0, 0], [1, 2], scores)
    assert result.tolist() == [1.0, -4.0, 1.0, -2.0, 1.0]


def test_presence_and_frequency_penalties_see_the_output_only() -> None:
    scores = torch.zeros(5)
    output = [2, 2, 2, 4]
    presence = edited(replace(GREEDY, presence_penalty=0.5), [0, 1, 2], output, scores)
    assert presence.tolist() == [0.0, 0.0, -0.5, 0.0, -0.5]
    frequency = edited(replace(GREEDY, frequency_penalty=0.5), [0, 1, 2], output, scores)
    assert frequency.tolist() == [0.0, 0.0, -1.5, 0.0, -0.5]


def test_the_first_token_sees_the_prompt_in_the_repetition_penalty_alone() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, [10, 20]] = torch.tensor([3.0, 2.5])
    prompt = {"prompt_token_ids": [10, 10, 10]}
    rows = [
        make_row(replace(GREEDY, repetition_penalty=2.0), **prompt),
        make_row(replace(GREEDY, presence_penalty=2.0), **prompt),
        make_row(replace(GREEDY, frequency_penalty=2.0), **prompt),
    ]
    assert ids(make_sampler().sample(logits, rows)) == [20, 10, 10]


def test_bias_comes_before_penalties() -> None:
    params = replace(GREEDY, logit_bias=((1, 4.0),), repetition_penalty=2.0)
    assert edited(params, [1], [], torch.zeros(3)).tolist() == [0.0, 2.0, 0.0]


def test_bias_of_minus_a_hundred_bans_and_plus_a_hundred_forces() -> None:
    logits = make_logits(1)
    best = int(logits.argmax())
    banned, forced = (replace(RANDOM, logit_bias=((best, bias),)) for bias in (-100.0, 100.0))
    assert best not in draw(logits, banned, 500).tolist()
    assert set(draw(logits, forced, 500).tolist()) == {best}


def test_min_tokens_bans_eos_and_stop_tokens_until_there_are_enough() -> None:
    scores = torch.zeros(12)
    params = replace(GREEDY, min_tokens=2, stop_token_ids=(3, 9))
    for output, banned in (([], {3, EOS, 9}), ([5], {3, EOS, 9}), ([5, 5], set())):
        result = edited(params, [1], output, scores)
        assert set(result.isinf().nonzero().flatten().tolist()) == banned
    ignoring = edited(replace(params, ignore_eos=True), [1], [], scores)
    assert set(ignoring.isinf().nonzero().flatten().tolist()) == {3, 9}


def test_edits_of_ids_beyond_the_vocabulary_change_nothing() -> None:
    params = replace(
        GREEDY,
        logit_bias=((VOCAB_SIZE, 5.0), (-1, 5.0)),
        repetition_penalty=2.0,
        min_tokens=4,
        stop_token_ids=(10**6,),
        ignore_eos=True,
    )
    scores = make_logits(1)[0]
    assert torch.equal(edited(params, [VOCAB_SIZE + 3], [10**9], scores), scores)


# --- log-probabilities


def test_logprobs_are_of_the_raw_logits_whatever_the_other_settings() -> None:
    logits = make_logits(1)
    expected = logits[0].log_softmax(dim=0)
    settings = [
        GREEDY,
        replace(RANDOM, temperature=0.2),
        replace(RANDOM, temperature=1.5, top_p=0.5),
        replace(RANDOM, logit_bias=((8, 100.0),), repetition_penalty=1.7, min_tokens=2),
    ]
    rows = [make_row(replace(params, logprobs=5)) for params in settings]
    best = expected.topk(5)
    for token in make_sampler().sample(logits, rows):
        assert token.logprobs is not None
        own, alternatives = token.logprobs
        assert own == pytest.approx(expected[token.token_id].item(), abs=1e-5)
        assert [token_id for token_id, _ in alternatives] == best.indices.tolist()
        assert [value for _, value in alternatives] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_logprobs_zero_reports_the_chosen_token_alone_and_none_reports_nothing() -> None:
    sampled = make_sampler().sample(make_logits(1), [make_row(replace(GREEDY, logprobs=0)), make_row(GREEDY)])
    assert sampled[0].logprobs is not None
    assert sampled[0].logprobs[1] == []
    assert sampled[1].logprobs is None


def test_logprobs_of_minus_infinity_and_nan_are_reported_as_the_floor() -> None:
    logits = torch.full((2, VOCAB_SIZE), -math.inf)
    logits[0, 5] = 1.0
    logits[1, 5] = math.inf
    params = replace(GREEDY, logprobs=3, logit_bias=((6, 0.0),))
    for token in make_sampler().sample(logits, [make_row(params, 0), make_row(params, 1)]):
        assert token.token_id == 5
        assert token.logprobs is not None
        values = [token.logprobs[0], *(value for _, value in token.logprobs[1])]
        assert all(math.isfinite(value) for value in values)
        assert LOGPROB_FLOOR in values


def test_no_rows_give_no_tokens() -> None:
    assert make_sampler().sample(torch.empty(0, VOCAB_SIZE), []) == []


def assert_frequencies(counts: torch.Tensor, expected: torch.Tensor) -> None:
    """Chi-square at about five standard deviations of its own spread; every cell must be well filled."""
    wanted = expected * counts.sum()
    assert wanted.min() > 5
    chi_square = ((counts - wanted) ** 2 / wanted).sum().item()
    freedom = len(expected) - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)
