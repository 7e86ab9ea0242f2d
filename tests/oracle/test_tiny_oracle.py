"""The engine equals a plain Transformers greedy loop on small random models of five families."""

from collections.abc import Callable

import pytest

from tests.oracle.compare import compare_answers
from tests.oracle.configurations import Configuration, Workload, six_configurations
from tests.oracle.conftest import OracleModel, Tally
from tests.oracle.engine_runs import greedy, run_engine
from tests.oracle.prompts import tiny_prompts
from tests.tiny_models import FAMILIES, SLIDING_WINDOW

pytestmark = pytest.mark.oracle

NUM_TOKENS = 32
MAX_MODEL_LEN = 336
#: Around the block sizes, the chunk sizes and the window of Mistral, on both sides. Neighbours near 240 outgrow a
#: block of 256 together.
LENGTHS = (5, 240, 17, 64, 33, 15, 300, 63, 129, 65, 244, 230, 250, 256, 7, 97, 255, 16, 31, 257, 48, 160, 128, 200)
CONFIGURATIONS = (
    *six_configurations(wide=512, aligned=96, alignment=64, narrow=24),
    Configuration("policy default, recompute", policy="default", preemption="recompute"),
    Configuration("policy default, swap", policy="default", preemption="swap"),
)
SUBSET = (CONFIGURATIONS[2], CONFIGURATIONS[4], CONFIGURATIONS[5])
ModelOf = Callable[[str], OracleModel]


def _check(
    configuration: Configuration, model: OracleModel, name: str, lengths: tuple[int, ...], block_size: int, tally: Tally
) -> None:
    workload = Workload(lengths, NUM_TOKENS, block_size, MAX_MODEL_LEN)
    params = greedy(NUM_TOKENS)
    prompts = tiny_prompts(lengths)
    expected = [model.answer(prompt, params) for prompt in prompts]
    run = run_engine(configuration.engine_config(str(model.folder), workload), prompts, [params] * len(prompts))
    comparison = compare_answers(expected, run.answers)
    tally.add(f"{name}, blocks of {block_size}, {configuration.name}", comparison, run.totals)
    configuration.check_it_did_its_work(workload, run.totals, run.records)


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [8, 16, 256])
@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=lambda configuration: configuration.name)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gets_the_tokens_of_a_plain_loop(
    family: str, configuration: Configuration, block_size: int, tiny_model: ModelOf, tally: Tally
) -> None:
    _check(configuration, tiny_model(family), family, LENGTHS, block_size, tally)


@pytest.mark.parametrize("configuration", SUBSET, ids=lambda configuration: configuration.name)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gets_the_tokens_of_a_plain_loop_on_some_prompts(
    family: str, configuration: Configuration, tiny_model: ModelOf, tally: Tally
) -> None:
    _check(configuration, tiny_model(family), family, LENGTHS[:10], 16, tally)


def test_random_models_give_answers_worth_comparing(tiny_model: ModelOf) -> None:
    for family in FAMILIES:
        answers = [tiny_model(family).answer(prompt, greedy(NUM_TOKENS)) for prompt in tiny_prompts(LENGTHS[:10])]
        assert len({tuple(answer.token_ids) for answer in answers}) == len(answers)
        num_distinct = sorted(len(set(answer.token_ids)) for answer in answers)
        assert num_distinct[len(answers) // 2] > NUM_TOKENS // 3, (family, num_distinct)


def test_some_prompts_are_longer_and_some_answers_cross_the_window() -> None:
    assert any(length > SLIDING_WINDOW * 2 for length in LENGTHS[:10])
    assert any(SLIDING_WINDOW - NUM_TOKENS < length < SLIDING_WINDOW for length in LENGTHS[:10])
