"""Every mix of budget, alignment, prefix cache, pool and order gives every request exactly its solo tokens."""

from itertools import product
from random import Random

import pytest

from scheduler import PreemptionMode, QueuePolicy, SchedulerConfig
from tests.integer_oracle.player import Played, Player, check_answers
from tests.integer_oracle.runner import VOCAB_SIZE
from tests.integer_oracle.scenario import Arrival, Scenario, random_arrival

BUDGETS = (64, 512, 2048)
ALIGNMENTS = (1, 256)
NUM_SEEDS = 2

BLOCK_SIZE = 16
MAX_MODEL_LEN = 640
#: the longest request and its parting siblings just fit
TINY = MAX_MODEL_LEN // BLOCK_SIZE + 8

#: preemption mode, device blocks, host blocks
POOLS = {
    "ample": (PreemptionMode.AUTO, 600, 100),
    "tiny recompute": (PreemptionMode.RECOMPUTE, TINY, 0),
    "tiny swap": (PreemptionMode.SWAP, TINY, 200),
    "tiny auto": (PreemptionMode.AUTO, TINY, 12),
}


def mixed_scenario(
    rng: Random, pool: str, order: QueuePolicy, budget: int, alignment: int, *, has_prefix_cache: bool
) -> Scenario:
    mode, num_device_blocks, num_host_blocks = POOLS[pool]
    config = SchedulerConfig(
        budget,
        max_num_seqs=16,
        max_model_len=MAX_MODEL_LEN,
        preemption_mode=mode,
        queue_policy=order,
        chunk_alignment=alignment,
        priority_aging_s=rng.choice([1.0, 1000.0]),
        tenant_weights={"a": 2.0},
    )
    prefix = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([127, 128, 129, 400]))]
    arrivals = [arrival(rng, f"r{number}", prefix) for number in range(8)]
    return Scenario(
        config,
        BLOCK_SIZE,
        num_device_blocks,
        num_host_blocks,
        arrivals,
        num_steps_in_flight=rng.choice([1, 2]),
        has_prefix_cache=has_prefix_cache,
        swap_blocks_per_s=rng.choice([1.0, 1000.0]),
    )


def arrival(rng: Random, request_id: str, prefix: list[int]) -> Arrival:
    """Mostly early and with long answers: together they fill the budget, and then the tiny pools."""
    longest = MAX_MODEL_LEN - 100 if rng.random() < 0.3 else 150
    made = random_arrival(rng, request_id, longest, prefix)
    made.step //= 3
    made.max_tokens += rng.choice([0, 60])
    made.has_stop_token = rng.random() < 0.3
    return made


def add(total: Played, played: Played) -> None:
    total.num_recomputes += played.num_recomputes
    total.num_swaps += played.num_swaps
    total.num_hit_blocks += played.num_hit_blocks
    total.num_copied_blocks += played.num_copied_blocks
    total.reasons |= played.reasons


@pytest.mark.parametrize("order", QueuePolicy)
@pytest.mark.parametrize("pool", POOLS)
def test_no_mix_of_options_changes_a_token(pool: str, order: QueuePolicy) -> None:
    totals = {has_prefix_cache: Played() for has_prefix_cache in (False, True)}
    for budget, alignment, has_prefix_cache, seed in product(BUDGETS, ALIGNMENTS, totals, range(NUM_SEEDS)):
        scenario = mixed_scenario(
            Random(seed), pool, order, budget, alignment, has_prefix_cache=has_prefix_cache
        )
        try:
            played = Player(scenario).play()
            check_answers(scenario, played)
        except Exception as error:
            error.add_note(f"budget {budget}, alignment {alignment}, cache {has_prefix_cache}, seed {seed}")
            raise
        add(totals[has_prefix_cache], played)
    assert totals[False].num_hit_blocks == 0
    assert totals[True].num_hit_blocks > 20
    for total in totals.values():
        assert total.num_copied_blocks > 50
        assert "token_budget" in total.reasons
        if pool == "ample":
            assert "sequence_slots" in total.reasons
            # Blocks are never short there; an urgent request may still preempt for its sequence slots.
            assert total.num_recomputes + total.num_swaps == 0 or order is QueuePolicy.PRIORITY
        else:
            assert "blocks" in total.reasons
            assert (total.num_recomputes > 5) == (pool != "tiny swap")
            assert (total.num_swaps > 0) == (pool != "tiny recompute")
