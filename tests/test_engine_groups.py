"""Several answers to a prompt by the real engine on tiny models: samples, ends of single ones, resumed requests."""

from dataclasses import replace

import pytest

from tests.group_runs import Run
from tests.oracle.prompts import tiny_prompts
from tests.tiny_models import save_tiny_model
from worker.config import EngineConfig
from worker.engine import Engine
from worker.request_checks import RequestError
from worker.types import BeamParams, EngineRequest, SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK_SIZE = 8
NUM_TOKENS = 24
PROMPTS = tiny_prompts([13, 40, 16, 8, 29, 5])
SAMPLED = SamplingParams(max_tokens=NUM_TOKENS, n=4, temperature=1.0, seed=11, ignore_eos=True)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return EngineConfig(
        model=str(save_tiny_model(tmp_path_factory.mktemp("tiny"), "llama")),
        dtype="float32",
        device="cpu",
        max_model_len=96,
        max_num_batched_tokens=48,
        block_size=BLOCK_SIZE,
        num_device_blocks=200,
        chunk_alignment=1,
    )


def requests_of(params: SamplingParams, prompts: list[list[int]] = PROMPTS) -> list[EngineRequest]:
    return [EngineRequest(str(place), prompt, params) for place, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def alone(config: EngineConfig) -> dict[tuple[str, int], list[int]]:
    """Each request by itself, in an ample pool and without a cache."""
    engine = Engine(replace(config, enable_prefix_caching=False))
    answers: dict[tuple[str, int], list[int]] = {}
    for request in requests_of(SAMPLED):
        answers |= Run(engine, [request]).answers
    assert len({tuple(answer) for answer in answers.values()}) == len(answers)
    return answers


# --- samples


def test_the_first_sample_is_the_answer_of_a_request_for_one(
    config: EngineConfig, alone: dict[tuple[str, int], list[int]]
) -> None:
    run = Run(Engine(config), requests_of(replace(SAMPLED, n=1)))
    assert all(run.answers[key] == alone[key] for key in run.answers)


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize(
    ("mode", "num_blocks", "num_host_blocks"),
    [("auto", 200, None), ("recompute", 32, None), ("swap", 32, 200), ("auto", 32, 200), ("auto", 32, 20)],
)
def test_samples_are_the_same_in_company_after_preemptions_and_with_a_cache(
    config: EngineConfig,
    alone: dict[tuple[str, int], list[int]],
    mode: str,
    num_blocks: int,
    num_host_blocks: int | None,
    cache: bool,
) -> None:
    engine = Engine(
        replace(
            config,
            preemption_mode=mode,
            num_device_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            enable_prefix_caching=cache,
        )
    )
    run = Run(engine, requests_of(SAMPLED))
    assert run.answers == alone
    assert set(run.reasons.values()) == {"length"}
    totals = engine.totals
    num_preemptions = totals.num_preemptions_recompute + totals.num_preemptions_swap
    assert (num_preemptions > 0) == (num_blocks == 32)
    if mode == "recompute":
        assert totals.num_preemptions_swap == 0
    if (mode, num_host_blocks, num_blocks) == ("swap", 200, 32):
        assert totals.num_preemptions_recompute == 0
    # Again, on what the first run left in the cache.
    again = Run(engine, requests_of(SAMPLED))
    assert again.answers == alone
    assert any(again.cached.values()) == (cache and totals.num_blocks_hit > 0)


def test_greedy_samples_are_all_the_same(config: EngineConfig) -> None:
    run = Run(Engine(config), requests_of(replace(SAMPLED, n=2, temperature=0.0)))
    for request in requests_of(SAMPLED):
        assert run.answers[request.request_id, 0] == run.answers[request.request_id, 1]


def test_the_prompt_of_many_samples_is_computed_once(config: EngineConfig) -> None:
    engine = Engine(replace(config, enable_prefix_caching=False))
    Run(engine, [EngineRequest("a", PROMPTS[1], replace(SAMPLED, n=8))])
    records = engine.records_since(-1)
    assert sum(record.num_prefill_tokens for record in records) == len(PROMPTS[1])
    assert max(record.num_device_blocks_used for record in records) <= 5 + 8 * 4


# --- ends


def test_a_sample_that_is_finished_outside_ends_alone(
    config: EngineConfig, alone: dict[tuple[str, int], list[int]]
) -> None:
    def finish(step: int, run: Run) -> None:
        if step == 8:
            run.engine.finish("1", 2, 3)
            run.engine.finish("1", 2, 3)  # idempotent
            run.engine.finish("1", 99, 3)
            run.engine.finish("nobody", 0, 3)

    run = Run(Engine(config), requests_of(SAMPLED), finish)
    assert run.reasons.pop(("1", 2)) == "stop"
    assert set(run.reasons.values()) == {"length"}
    cut = run.answers.pop(("1", 2))
    assert cut == alone["1", 2][: len(cut)]
    assert 0 < len(cut) < NUM_TOKENS
    assert all(run.answers[key] == alone[key] for key in run.answers)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_samples_finished_at_any_step_change_nothing_for_the_others_in_a_tight_pool(
    config: EngineConfig, alone: dict[tuple[str, int], list[int]], mode: str
) -> None:
    for first_step in (1, 3, 7, 12):
        engine = Engine(
            replace(config, preemption_mode=mode, num_device_blocks=30, num_host_blocks=100, max_num_seqs=20)
        )

        def finish(step: int, run: Run, first_step: int = first_step) -> None:
            if step >= first_step and step % 5 == 0:
                place = step // 5 % len(PROMPTS)
                run.engine.finish(str(place), step % SAMPLED.n, 1)
            if step == first_step + 9:
                run.engine.abort("4")

        run = Run(engine, requests_of(SAMPLED), finish)
        assert engine.totals.num_preemptions_recompute + engine.totals.num_preemptions_swap > 0
        for key, answer in run.answers.items():
            assert answer == alone[key][: len(answer)]
            assert (len(answer) == NUM_TOKENS) == (run.reasons[key] == "length")


def test_each_sample_ends_at_its_own_stop_token(
    config: EngineConfig, alone: dict[tuple[str, int], list[int]]
) -> None:
    stop = alone["0", 1][5]
    run = Run(Engine(config), requests_of(replace(SAMPLED, stop_token_ids=(stop,))))
    for key, answer in run.answers.items():
        whole = alone[key]
        expected = whole[: whole.index(stop) + 1] if stop in whole else whole
        assert answer == expected
        assert run.reasons[key] == ("stop" if stop in whole else "length")


def test_what_cannot_be_run_is_refused(config: EngineConfig) -> None:
    engine = Engine(replace(config, max_num_seqs=4))
    for params in (replace(SAMPLED, n=5), replace(SAMPLED, n=0), replace(SAMPLED, n=3, beam=BeamParams(2))):
        with pytest.raises(RequestError):
            engine.add_request(EngineRequest("a", PROMPTS[0], params), 0.0)
    assert not engine.has_unfinished()
    Run(engine, requests_of(SAMPLED))


@pytest.mark.parametrize(("mode", "num_host_blocks"), [("swap", 200), ("swap", 10), ("auto", 10), ("recompute", None)])
def test_large_groups_take_turns_in_a_pool_for_one_and_the_engine_goes_on(
    config: EngineConfig, mode: str, num_host_blocks: int | None
) -> None:
    # vllm-project/vllm#546
    [prompt, short] = tiny_prompts([60, 5])
    params = replace(SAMPLED, n=24)
    engine = Engine(
        replace(config, preemption_mode=mode, num_device_blocks=108, num_host_blocks=num_host_blocks, max_num_seqs=48)
    )
    requests = [EngineRequest(name, prompt, params) for name in "abc"]
    run = Run(engine, [*requests, EngineRequest("short", short, replace(params, n=1))])
    assert set(run.reasons.values()) == {"length"}
    assert {len(answer) for answer in run.answers.values()} == {NUM_TOKENS}
    for index in range(24):
        assert run.answers["a", index] == run.answers["b", index] == run.answers["c", index]
    assert engine.totals.num_preemptions_recompute + engine.totals.num_preemptions_swap > 0
    assert len(Run(engine, [requests[0]]).answers) == 24


def test_a_group_that_outgrows_the_pool_ends_with_length_and_alone(config: EngineConfig) -> None:
    [prompt, short] = tiny_prompts([60, 5])
    engine = Engine(replace(config, num_device_blocks=40, num_host_blocks=100, max_num_seqs=48))
    run = Run(
        engine,
        [
            EngineRequest("large", prompt, replace(SAMPLED, n=16)),
            EngineRequest("short", short, replace(SAMPLED, n=1)),
        ],
    )
    assert set(run.reasons.values()) == {"length"}
    assert len(run.answers["short", 0]) == NUM_TOKENS
    lengths = {len(run.answers["large", index]) for index in range(16)}
    assert len(lengths) == 1
    assert 0 < lengths.pop() < NUM_TOKENS


def test_beams_that_outgrow_the_pool_end_with_the_best_so_far(config: EngineConfig) -> None:
    engine = Engine(replace(config, num_device_blocks=14, num_host_blocks=100))
    params = SamplingParams(max_tokens=80, n=3, ignore_eos=True, beam=BeamParams(12))
    [prompt] = tiny_prompts([10])
    run = Run(engine, [EngineRequest("beams", prompt, params)])
    assert set(run.reasons.values()) == {"length"}
    assert all(0 < len(answer) < 80 for answer in run.answers.values())
    assert len({tuple(answer) for answer in run.answers.values()}) == 3


def test_an_aborted_beam_search_ends_each_of_its_answers_once(config: EngineConfig) -> None:
    params = SamplingParams(max_tokens=20, n=2, ignore_eos=True, beam=BeamParams(4))
    for abort_step in (0, 1, 5):

        def abort(step: int, run: Run, abort_step: int = abort_step) -> None:
            if step == abort_step:
                run.engine.abort("0")

        run = Run(Engine(config), requests_of(params), abort)
        assert [run.reasons["0", index] for index in range(2)] == ["abort"] * 2
        assert all(run.reasons[key] == "length" for key in run.reasons if key[0] != "0")


# --- resumed requests


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("num_blocks", [200, 30])
def test_a_resumed_request_goes_on_with_the_same_tokens(
    config: EngineConfig, alone: dict[tuple[str, int], list[int]], num_blocks: int, cache: bool
) -> None:
    engine = Engine(replace(config, num_device_blocks=num_blocks, enable_prefix_caching=cache))
    for lengths in ((1, 1, 1, 1), (3, 9, 1, 16), (23, 2, 8, 8)):
        requests = [
            replace(
                request,
                output_token_ids=[
                    alone[request.request_id, index][:length] for index, length in enumerate(lengths)
                ],
            )
            for request in requests_of(SAMPLED)
        ]
        run = Run(engine, requests)
        for (request_id, index), answer in run.answers.items():
            assert answer == alone[request_id, index][lengths[index] :]
    assert (engine.totals.num_preemptions_recompute + engine.totals.num_preemptions_swap > 0) == (num_blocks == 30)


def test_penalties_of_each_sample_see_its_own_tokens_after_a_resume(config: EngineConfig) -> None:
    params = replace(SAMPLED, n=2, presence_penalty=1.5, repetition_penalty=1.3)
    engine = Engine(config)
    whole = Run(engine, requests_of(params)).answers
    resumed = [
        replace(request, output_token_ids=[whole[request.request_id, 0][:7], whole[request.request_id, 1][:12]])
        for request in requests_of(params)
    ]
    run = Run(engine, resumed)
    assert all(answer == whole[key][7 if key[1] == 0 else 12 :] for key, answer in run.answers.items())
