"""Every request gets its solo tokens, whatever the limits, the company, preemptions and cancels."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler import PreemptionMode, SchedulerPolicy
from tests.integer_oracle.scenario import Player, random_scenario

NUM_SCENARIOS = 1500
MODES = [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP]


@pytest.mark.parametrize("policy", SchedulerPolicy)
@pytest.mark.parametrize("mode", MODES)
def test_every_request_gets_exactly_its_solo_tokens(policy: SchedulerPolicy, mode: PreemptionMode) -> None:
    num_recomputes = num_swaps = num_refused = 0
    for seed in range(NUM_SCENARIOS):
        try:
            played = Player(random_scenario(Random(seed), policy, mode)).play()
        except Exception as error:
            error.add_note(f"scenario {seed}")
            raise
        num_recomputes += played.num_recomputes
        num_swaps += played.num_swaps
        num_refused += played.num_refused
    assert num_recomputes > 100
    assert (num_swaps > 100) == (mode is PreemptionMode.SWAP)
    assert num_refused > 0


@settings(max_examples=150, deadline=None)
@given(rng=st.randoms(use_true_random=False), policy=st.sampled_from(SchedulerPolicy), mode=st.sampled_from(MODES))
def test_shrinkable_scenarios_give_solo_tokens_too(rng: Random, policy: SchedulerPolicy, mode: PreemptionMode) -> None:
    Player(random_scenario(rng, policy, mode)).play()
