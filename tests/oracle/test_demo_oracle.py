"""The engine on the demo model in float32 equals a plain Transformers greedy loop, token for token."""

import pytest

from tests.oracle.compare import compare_answers
from tests.oracle.configurations import Configuration, Workload, six_configurations
from tests.oracle.conftest import OracleModel, Tally
from tests.oracle.engine_runs import greedy, run_engine
from tests.real_prompts import LONGEST_PROMPT_TOKENS, NUM_PROMPTS, SHORTEST_PROMPT_TOKENS
from worker.config import blocks_for

pytestmark = [pytest.mark.oracle, pytest.mark.model]

NUM_TOKENS = 32
FEW_TOKENS = 19
BLOCK_SIZE = 16
CONFIGURATIONS = six_configurations(wide=2048, aligned=512, alignment=256, narrow=64)


def _check(
    configuration: Configuration,
    demo_model: OracleModel,
    prompts: list[list[int]],
    num_tokens: int,
    tally: Tally,
) -> None:
    lengths = tuple(len(prompt) for prompt in prompts)
    max_model_len = blocks_for(max(lengths) + num_tokens, BLOCK_SIZE) * BLOCK_SIZE
    workload = Workload(lengths, num_tokens, BLOCK_SIZE, max_model_len)
    params = greedy(num_tokens)
    config = configuration.engine_config(str(demo_model.folder), workload)
    run = run_engine(config, prompts, [params] * len(prompts))
    expected = [
        demo_model.answer(prompt, params, guess=answer) for prompt, answer in zip(prompts, run.answers, strict=True)
    ]
    tally.add(f"demo, {configuration.name}", compare_answers(expected, run.answers), run.totals)
    configuration.check_it_did_its_work(workload, run.totals, run.records)


def test_the_prompts_are_forty_of_5_to_1500_tokens_and_all_differ(demo_prompts: list[list[int]]) -> None:
    lengths = [len(prompt) for prompt in demo_prompts]
    assert (min(lengths), max(lengths)) == (SHORTEST_PROMPT_TOKENS, LONGEST_PROMPT_TOKENS)
    assert len({tuple(prompt[:SHORTEST_PROMPT_TOKENS]) for prompt in demo_prompts}) >= NUM_PROMPTS // 2
    assert len({tuple(prompt) for prompt in demo_prompts}) == len(demo_prompts) == NUM_PROMPTS


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=lambda configuration: configuration.name)
def test_real_prompts_get_the_tokens_of_a_plain_loop(
    configuration: Configuration, demo_model: OracleModel, demo_prompts: list[list[int]], tally: Tally
) -> None:
    _check(configuration, demo_model, demo_prompts, NUM_TOKENS, tally)


@pytest.mark.parametrize(
    "configuration",
    six_configurations(wide=256, aligned=48, alignment=32, narrow=24)[2:6:2],
    ids=lambda configuration: configuration.name,
)
def test_a_few_real_prompts_get_the_tokens_of_a_plain_loop(
    configuration: Configuration, demo_model: OracleModel, demo_prompts: list[list[int]], tally: Tally
) -> None:
    prompts = sorted(demo_prompts, key=len)[8:22:3]
    _check(configuration, demo_model, prompts, FEW_TOKENS, tally)
