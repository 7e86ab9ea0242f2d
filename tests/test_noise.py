import math

import pytest
import torch

from worker.noise import gumbel, row_key, token_hash

KEYS = {
    (0, 0, 0): -3642835858507119612,
    (1, 0, 0): -2584930730200867331,
    (0, 1, 0): 21503351411650807,
    (0, 0, 1): 3108677790431328310,
    (42, 3, 1234): -249475290413272769,
    (-7, 0, 10): 822539033302977397,
    (2**63 - 1, 1, 4096): -1849817028104866960,
}
TOKEN_IDS = [0, 1, 2, 49151, 151935]
HASHES = {
    (0, 0, 0): [
        -8676794757057241176,
        -3173325898031349883,
        -7289961650423103815,
        692047462088294900,
        4166830024824925634,
    ],
    (42, 3, 1234): [
        -1830253633725057273,
        9006049597803041184,
        7214565781275350624,
        -8966036868897367628,
        -6561988696868512473,
    ],
}
GUMBELS = {
    (0, 0, 0): [0.4532227, 1.6672051, 0.6874827, -1.1887542, -0.3972530],
    (42, 3, 1234): [2.2586421, 0.3326915, 0.0631679, 0.4070229, 0.8218187],
}


def keys_of(*addresses: tuple[int, int, int]) -> torch.Tensor:
    return torch.tensor([row_key(*address) for address in addresses]).unsqueeze(1)


@pytest.mark.parametrize("address", KEYS)
def test_row_keys_have_their_golden_values(address: tuple[int, int, int]) -> None:
    assert row_key(*address) == KEYS[address]


def test_hashes_have_their_golden_values() -> None:
    assert token_hash(keys_of(*HASHES), torch.tensor(TOKEN_IDS)).tolist() == list(HASHES.values())


def test_gumbel_values_have_their_golden_values() -> None:
    noise = gumbel(keys_of(*GUMBELS), torch.tensor(TOKEN_IDS))
    assert noise.dtype == torch.float32
    torch.testing.assert_close(noise, torch.tensor(list(GUMBELS.values())), rtol=0, atol=1e-6)


def test_noise_of_a_pair_is_the_same_alone_and_in_a_full_pass() -> None:
    keys = keys_of((1, 0, 5), (2, 1, 6), (3, 0, 7))
    full = gumbel(keys, torch.arange(5000))
    rows, token_ids = torch.tensor([2, 0, 1, 1]), torch.tensor([4999, 0, 17, 3])
    assert torch.equal(gumbel(keys.squeeze(1)[rows], token_ids), full[rows, token_ids])


def test_seeds_are_taken_modulo_two_to_the_64() -> None:
    assert row_key(2**64 + 5, 0, 3) == row_key(5, 0, 3)
    assert row_key(-1, 0, 3) == row_key(2**64 - 1, 0, 3)


def test_noise_over_tokens_is_gumbel_by_a_kolmogorov_smirnov_test() -> None:
    assert_is_gumbel(gumbel(keys_of((123, 0, 77)), torch.arange(200_000)).flatten())


@pytest.mark.parametrize("varied", [0, 1, 2], ids=["seed", "sample_index", "position"])
def test_noise_of_one_token_over_each_coordinate_is_gumbel(varied: int) -> None:
    addresses = [tuple(step if place == varied else 9 for place in range(3)) for step in range(20_000)]
    assert_is_gumbel(gumbel(keys_of(*addresses), torch.tensor([11])).flatten())


def test_neighbours_in_every_coordinate_are_uncorrelated() -> None:
    token_ids = torch.arange(100_000)
    base = gumbel(keys_of((5, 0, 100)), token_ids).flatten()
    neighbours = gumbel(keys_of((6, 0, 100), (5, 1, 100), (5, 0, 101), (5, 1, 99)), token_ids)
    for other in [*neighbours, base.roll(1)]:
        correlation = torch.corrcoef(torch.stack([base, other]))[0, 1].item()
        assert abs(correlation) < 4 / math.sqrt(len(base))


def test_each_input_bit_flips_about_half_of_the_output_bits() -> None:
    keys, token_ids = keys_of(*[(seed, 0, 0) for seed in range(32)]), torch.arange(1024)
    plain = token_hash(keys, token_ids)
    for bit in range(18):
        flipped = plain ^ token_hash(keys, token_ids ^ (1 << bit))
        for output_bit in range(64):
            share = ((flipped >> output_bit) & 1).double().mean().item()
            assert abs(share - 0.5) < 0.02, (bit, output_bit)


def assert_is_gumbel(noise: torch.Tensor) -> None:
    """Largest distance from the distribution function exp(-exp(-x)), at a significance of about 1e-6."""
    assert torch.isfinite(noise).all()
    cumulative = noise.double().sort().values.neg().exp().neg().exp()
    expected = (torch.arange(len(noise)) + 0.5) / len(noise)
    assert (cumulative - expected).abs().max().item() < 2.7 / math.sqrt(len(noise))
