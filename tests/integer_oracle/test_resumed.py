"""A request that goes on elsewhere from any point gets the tokens, and the ends, that it would have had at home."""

from dataclasses import replace
from random import Random

import pytest

from scheduler import PreemptionMode, SchedulerPolicy
from tests.integer_oracle.player import Played, Player, check_answers
from tests.integer_oracle.scenario import Arrival, Scenario, random_scenario

NUM_SCENARIOS = 80


def resumed(scenario: Scenario, rng: Random) -> Scenario:
    """The same requests, of which most had some of their output elsewhere. Samples of one request were cut in one
    step, so those that had not ended have equally many tokens."""
    return replace(scenario, arrivals=[cut(scenario, arrival, rng) for arrival in scenario.arrivals])


def cut(scenario: Scenario, arrival: Arrival, rng: Random) -> Arrival:
    if arrival.is_beam or rng.random() < 0.2:
        return arrival
    undisturbed = replace(arrival, cancel_step=None, finish=None)
    home = Player(replace(scenario, arrivals=[undisturbed], num_steps_in_flight=1)).play()
    if not home.ends or "error" in home.ends.values():
        return arrival
    lengths = [len(home.outputs[arrival.request_id, index]) for index in range(arrival.num_samples)]
    num_tokens = rng.randrange(max(lengths))
    return replace(
        arrival,
        finish=None,
        num_resumed=tuple(min(length, num_tokens) for length in lengths),
        ended_samples=tuple(index for index, length in enumerate(lengths) if length <= num_tokens),
    )


@pytest.mark.parametrize("mode", PreemptionMode)
@pytest.mark.parametrize("policy", SchedulerPolicy)
def test_a_request_cut_anywhere_goes_on_with_its_solo_tokens(policy: SchedulerPolicy, mode: PreemptionMode) -> None:
    total = Played()
    num_resumed = num_with_ended = 0
    for seed in range(NUM_SCENARIOS):
        rng = Random(seed)
        scenario = resumed(random_scenario(rng, policy, mode), rng)
        try:
            played = Player(scenario).play()
            check_answers(scenario, played)
        except Exception as error:
            error.add_note(f"scenario {seed}")
            raise
        total.num_recomputes += played.num_recomputes
        total.num_swaps += played.num_swaps
        total.num_hit_blocks += played.num_hit_blocks
        num_resumed += sum(any(arrival.num_resumed) for arrival in scenario.arrivals)
        num_with_ended += sum(bool(arrival.ended_samples) for arrival in scenario.arrivals)
    assert total.num_recomputes > 5
    assert (total.num_swaps > 0) == (mode is not PreemptionMode.RECOMPUTE)
    assert total.num_hit_blocks > 50
    assert num_resumed > 5 * NUM_SCENARIOS // 2
    assert num_with_ended > 10
