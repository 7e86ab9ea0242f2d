"""The prefix cache in the real engine: the same tokens as without it, and what is counted."""

from dataclasses import replace

import pytest

from tests.group_runs import Run
from tests.oracle.prompts import tiny_prompts
from tests.tiny_models import save_tiny_model
from worker.config import EngineConfig
from worker.engine import Engine
from worker.prefix_keys import PrefixKeys
from worker.types import EngineRequest, SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK_SIZE = 16
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return EngineConfig(
        model=str(save_tiny_model(tmp_path_factory.mktemp("tiny"), "qwen2")),
        dtype="float32",
        device="cpu",
        max_model_len=192,
        max_num_batched_tokens=64,
        block_size=BLOCK_SIZE,
        num_device_blocks=100,
        chunk_alignment=1,
    )


def ask(engine: Engine, prompt: list[int], params: SamplingParams = GREEDY, salt: str = "") -> tuple[list[int], int]:
    """The answer, and how many tokens of the prompt came from the cache."""
    run = Run(engine, [EngineRequest("a", prompt, params, cache_salt=salt)])
    return run.answers["a", 0], run.cached["a"]


def num_prefilled(engine: Engine) -> int:
    return sum(record.num_prefill_tokens for record in engine.records_since(-1))


@pytest.mark.parametrize("num_tokens", [15, 16, 17, 31, 32, 33, 64])
def test_a_prompt_asked_twice_is_computed_from_its_last_block_on(config: EngineConfig, num_tokens: int) -> None:
    # vllm-project/vllm#30320: a prompt that is wholly cached still computes its last token.
    engine = Engine(config)
    [prompt] = tiny_prompts([num_tokens])
    first = ask(engine, prompt)
    assert first[1] == 0
    before = num_prefilled(engine)
    answer, num_cached = ask(engine, prompt)
    assert answer == first[0]
    assert num_cached == (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert num_prefilled(engine) - before == num_tokens - num_cached
    one_token = replace(GREEDY, max_tokens=1)
    assert ask(engine, prompt, one_token) == (first[0][:1], num_cached)


def test_an_answer_is_found_by_the_prompt_that_goes_on_from_it(config: EngineConfig) -> None:
    engine = Engine(config)
    [prompt] = tiny_prompts([20])
    answer, _ = ask(engine, prompt, replace(GREEDY, max_tokens=30))
    # 49 tokens were computed (the last one was only sampled): three blocks.
    [more] = tiny_prompts([10])
    off = Engine(replace(config, enable_prefix_caching=False))
    assert ask(engine, prompt + answer + more) == (ask(off, prompt + answer + more)[0], 48)


@pytest.mark.parametrize("salt", ["", "mine"])
def test_only_requests_of_one_salt_share(config: EngineConfig, salt: str) -> None:
    # vllm-project/vllm#12621
    engine = Engine(config)
    [prompt] = tiny_prompts([40])
    answer, _ = ask(engine, prompt, salt=salt)
    assert ask(engine, prompt, salt="theirs") == (answer, 0)
    assert ask(engine, prompt, salt=salt) == (answer, 32)
    assert ask(engine, prompt, salt="theirs") == (answer, 32)


def test_keys_depend_on_secret_salt_adapter_and_all_tokens_before() -> None:
    keys = PrefixKeys(b"ours", 4)
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    [first, second] = keys.extend(keys.root(), tokens)
    others = [
        keys.extend(keys.root("a"), tokens),
        keys.extend(keys.root("", "a"), tokens),
        keys.extend(keys.root(), [0, *tokens[1:]]),
        PrefixKeys(b"theirs", 4).extend(keys.root(), tokens),
        PrefixKeys(b"x" * 65, 4).extend(keys.root(), tokens),
        PrefixKeys(b"x" * 66, 4).extend(keys.root(), tokens),
    ]
    seconds = [second, *(own[1] for own in others)]
    assert len(set(seconds)) == len(seconds)
    assert keys.extend(first, tokens[4:]) == [second]
    assert keys.root("a", "bc") != keys.root("ca", "b") != keys.root("c", "ab")


def test_a_block_that_was_given_away_is_not_found_again(config: EngineConfig) -> None:
    # vllm-project/vllm#4764
    engine = Engine(replace(config, num_device_blocks=10, max_model_len=128))
    off = Engine(replace(config, enable_prefix_caching=False))
    prompts = tiny_prompts([100, 101, 102])
    for prompt in [prompts[0], prompts[1], prompts[0], prompts[2], prompts[1], prompts[0]]:
        answer, num_cached = ask(engine, prompt)
        assert answer == ask(off, prompt)[0]
        assert num_cached < 96  # something of it was always taken by the one before
    assert ask(engine, prompts[0])[1] == 96


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_shared_prefixes_under_pressure_change_no_answer(config: EngineConfig, mode: str) -> None:
    # vllm-project/vllm#37076: 20 requests that share 127, 128 or 129 tokens, in a pool for a few of them
    [base] = tiny_prompts([129])
    tails = tiny_prompts([3, 5, 9, 1, 17, 4, 2] * 3)[:20]
    prompts = [base[: 127 + place % 3] + tail for place, tail in enumerate(tails)]
    params = replace(GREEDY, max_tokens=20)
    off = Engine(replace(config, enable_prefix_caching=False))
    expected = [ask(off, prompt, params)[0] for prompt in prompts]
    engine = Engine(
        replace(config, num_device_blocks=24, preemption_mode=mode, num_host_blocks=100, max_num_batched_tokens=48)
    )
    run = Run(engine, [EngineRequest(str(place), prompt, params) for place, prompt in enumerate(prompts)])
    assert [run.answers[str(place), 0] for place in range(20)] == expected
    assert engine.totals.num_blocks_hit > 50
    assert engine.totals.num_preemptions_recompute + engine.totals.num_preemptions_swap > 0


def test_every_block_is_back_after_two_hundred_requests_one_by_one(config: EngineConfig) -> None:
    # kekzl/imp#1115
    engine = Engine(replace(config, num_device_blocks=20))
    for place, prompt in enumerate(tiny_prompts([5 + place % 40 for place in range(200)])):
        ask(engine, prompt, replace(GREEDY, max_tokens=1 + place % 3))
    load = engine.load()
    assert (load.num_used_blocks, load.num_free_blocks) == (0, 19)
    assert load.num_cached_blocks > 0


def test_a_recompute_costs_little_where_the_cache_still_has_the_blocks(config: EngineConfig) -> None:
    """Eight prompts of 150 tokens with answers of 40, on a pool for three and a half of them."""
    params = replace(GREEDY, max_tokens=40)
    requests = [EngineRequest(str(place), prompt, params) for place, prompt in enumerate(tiny_prompts([150] * 8))]
    computed_again: dict[bool, float] = {}
    answers = []
    for cache in (True, False):
        engine = Engine(
            replace(config, num_device_blocks=45, preemption_mode="recompute", enable_prefix_caching=cache)
        )
        answers.append(Run(engine, requests).answers)
        num_discarded = engine.totals.num_discarded_tokens
        assert num_discarded > 150
        num_again = num_prefilled(engine) - 8 * 150
        computed_again[cache] = num_again / num_discarded
        print(f"cache {'on' if cache else 'off'}: {num_again} tokens prefilled again of {num_discarded} discarded")
    assert answers[0] == answers[1]
    assert computed_again[False] >= 1.0
    assert computed_again[True] < 0.5
