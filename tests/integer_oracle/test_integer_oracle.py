"""Every request gets its solo tokens, whatever the limits, the company, preemptions and cancels."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler import PreemptionMode, QueuePolicy, SchedulerPolicy
from tests.integer_oracle.player import Played, Player, check_answers
from tests.integer_oracle.scenario import Scenario, random_scenario

NUM_SCENARIOS = 150


def play(scenario: Scenario) -> Played:
    played = Player(scenario).play()
    check_answers(scenario, played)
    return played


@pytest.mark.parametrize("queue_policy", QueuePolicy)
@pytest.mark.parametrize("mode", PreemptionMode)
@pytest.mark.parametrize("policy", SchedulerPolicy)
def test_every_request_gets_exactly_its_solo_tokens(
    policy: SchedulerPolicy, mode: PreemptionMode, queue_policy: QueuePolicy
) -> None:
    total = Played()
    for seed in range(NUM_SCENARIOS):
        try:
            played = play(random_scenario(Random(seed), policy, mode, queue_policy))
        except Exception as error:
            error.add_note(f"scenario {seed}")
            raise
        total.num_recomputes += played.num_recomputes
        total.num_swaps += played.num_swaps
        total.num_refused += played.num_refused
        total.num_hit_blocks += played.num_hit_blocks
        total.num_copied_blocks += played.num_copied_blocks
    assert total.num_recomputes > 20
    assert (total.num_swaps > 10) == (mode is not PreemptionMode.RECOMPUTE)
    assert total.num_refused > 0
    assert total.num_hit_blocks > 100
    assert total.num_copied_blocks > 100


@settings(max_examples=100, deadline=None)
@given(
    rng=st.randoms(use_true_random=False),
    policy=st.sampled_from(SchedulerPolicy),
    mode=st.sampled_from(PreemptionMode),
    queue_policy=st.sampled_from(QueuePolicy),
)
def test_shrinkable_scenarios_give_solo_tokens_too(
    rng: Random, policy: SchedulerPolicy, mode: PreemptionMode, queue_policy: QueuePolicy
) -> None:
    play(random_scenario(rng, policy, mode, queue_policy))
