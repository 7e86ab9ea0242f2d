"""Groups of samples get the tokens of plain loops under mixes of budget, alignment, cache, pool and order."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import pytest

from tests.group_runs import Run
from tests.oracle.compare import compare_answers
from tests.oracle.conftest import OracleModel, Tally
from tests.oracle.mixes import ORDERS, POOLS, Mix, pairwise_mixes
from tests.oracle.prompts import tiny_prompts
from worker.engine import Engine
from worker.types import EngineRequest, SamplingParams

pytestmark = pytest.mark.oracle

TINY_MIXES = pairwise_mixes(budgets=(24, 96, 512), alignments=(1, 32))
DEMO_MIXES = pairwise_mixes(budgets=(64, 512, 2048), alignments=(1, 256))[:8]
NUM_SAMPLES = (1, 2, 4, 1, 3)


@dataclass(frozen=True, slots=True)
class Sizes:
    block_size: int
    ample_blocks: int
    tiny_blocks: int
    max_model_len: int


TINY = Sizes(block_size=8, ample_blocks=600, tiny_blocks=34, max_model_len=160)
DEMO = Sizes(block_size=16, ample_blocks=600, tiny_blocks=44, max_model_len=320)


def _requests(prompts: list[list[int]], num_tokens: int) -> list[EngineRequest]:
    """Greedy and sampled, of one to four answers, of two tenants and three classes."""
    greedy = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    requests = []
    for place, prompt in enumerate(prompts):
        n = NUM_SAMPLES[place % len(NUM_SAMPLES)]
        params = greedy if n == 1 and place % 2 else replace(greedy, n=n, temperature=1.0, seed=place)
        requests.append(
            EngineRequest(str(place), prompt, params, priority=place % 3 - 1, tenant="ab"[place % 2])
        )
    return requests


def _check(mix: Mix, model: OracleModel, name: str, requests: list[EngineRequest], sizes: Sizes, tally: Tally) -> None:
    engine = Engine(
        mix.engine_config(
            str(model.folder),
            block_size=sizes.block_size,
            ample_blocks=sizes.ample_blocks,
            tiny_blocks=sizes.tiny_blocks,
            max_model_len=sizes.max_model_len,
        )
    )
    run = Run(engine, requests, arrival_steps=[place // 2 for place in range(len(requests))])
    expected = [
        model.answer(
            request.prompt_token_ids, replace(request.params, n=1), index, run.answers[request.request_id, index]
        )
        for request in requests
        for index in range(request.params.n)
    ]
    tally.add(f"{name}, {mix}", compare_answers(expected, list(run.answers.values())), engine.totals)
    assert set(run.reasons.values()) == {"length"}
    num_preemptions = engine.totals.num_preemptions_recompute + engine.totals.num_preemptions_swap
    if mix.pool == "ample" and mix.order != "priority":
        assert num_preemptions == 0
    elif mix.pool != "ample":
        assert num_preemptions > 0
    assert (engine.totals.num_blocks_hit > 0) == mix.cache


def test_every_pair_of_settings_occurs() -> None:
    for mixes in (TINY_MIXES, pairwise_mixes(budgets=(64, 512, 2048), alignments=(1, 256))):
        assert {(mix.pool, mix.order) for mix in mixes} == set(product(POOLS, ORDERS))
        assert len({(mix.budget, mix.pool) for mix in mixes}) == 12
        assert len({(mix.cache, mix.alignment) for mix in mixes}) == 4
    assert {mix.pool for mix in DEMO_MIXES} == set(POOLS)


@pytest.mark.parametrize("mix", TINY_MIXES, ids=str)
def test_groups_on_a_tiny_model_get_the_tokens_of_plain_loops(
    mix: Mix, tiny_model: Callable[[str], OracleModel], tally: Tally
) -> None:
    [base] = tiny_prompts([48])
    tails = tiny_prompts([5, 40, 17, 9, 33, 24, 8, 3, 50, 12])
    prompts = [base[: 16 * (place % 4)] + tail for place, tail in enumerate(tails)]
    _check(mix, tiny_model("llama"), "llama, groups", _requests(prompts, 20), TINY, tally)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mix", DEMO_MIXES, ids=str)
def test_groups_on_the_demo_model_get_the_tokens_of_plain_loops(
    mix: Mix, demo_model: OracleModel, demo_prompts: list[list[int]], tally: Tally
) -> None:
    own = [prompt for prompt in sorted(demo_prompts, key=len) if 20 <= len(prompt) <= 120][:10]
    base = next(prompt for prompt in demo_prompts if len(prompt) > 160)
    prompts = [base[: 48 * (place % 4)] + prompt for place, prompt in enumerate(own)]
    _check(mix, demo_model, "demo, groups", _requests(prompts, 24), DEMO, tally)
