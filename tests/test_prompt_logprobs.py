"""Log-probabilities of prompts are those of a plain forward pass, however the prompt is cut, preempted or cached."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.oracle.prompts import tiny_prompts
from tests.tiny_models import FAMILIES, load_reference, save_tiny_model
from worker import prompt_scores
from worker.config import EngineConfig
from worker.engine import Engine
from worker.request_checks import RequestError
from worker.types import EngineRequest, PromptTokenLogprobs, SamplingParams, TokenEvent

pytestmark = pytest.mark.usefixtures("one_thread")

MAX_MODEL_LEN = 192
TOLERANCE = 1e-3
SCORED = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, prompt_logprobs=3)
SCORED_ALONE = replace(SCORED, max_tokens=0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: save_tiny_model(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


def engine_of(folder: Path, **options: object) -> Engine:
    settings = {"max_num_batched_tokens": 64, "max_num_seqs": 16, "num_device_blocks": 100, "chunk_alignment": 1}
    return Engine(
        EngineConfig(
            model=str(folder), dtype="float32", device="cpu", max_model_len=MAX_MODEL_LEN, **{**settings, **options}
        )
    )


def run(engine: Engine, requests: list[EngineRequest]) -> dict[str, list[TokenEvent]]:
    for request in requests:
        engine.add_request(request, 0.0)
    events: dict[str, list[TokenEvent]] = {request.request_id: [] for request in requests}
    step = 0
    while engine.has_unfinished():
        step += 1
        for event in engine.step(float(step)):
            events[event.request_id].append(event)
        engine.block_manager.check_integrity()
    engine.check_integrity()
    return events


def scores_in(events: list[TokenEvent]) -> list[PromptTokenLogprobs]:
    told = [event.prompt_logprobs for event in events if event.prompt_logprobs is not None]
    assert len(told) == 1, "the prompt's scores come once"
    assert events[0].prompt_logprobs is told[0]
    return told[0]


def assert_equals_a_plain_pass(
    model: torch.nn.Module, prompt: list[int], scores: list[PromptTokenLogprobs], num_alternatives: int = 3
) -> None:
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0].log_softmax(dim=-1)
    assert len(scores) == len(prompt) - 1
    for position, (logprob, rank, alternatives) in enumerate(scores):
        row, token_id = expected[position], prompt[position + 1]
        assert logprob == pytest.approx(row[token_id].item(), abs=TOLERANCE)
        # Scores closer than rounding may change places.
        assert (row > row[token_id] + TOLERANCE).sum() < rank <= 1 + (row > row[token_id] - TOLERANCE).sum()
        assert len(alternatives) == num_alternatives
        values = [value for _, value in alternatives]
        assert values == pytest.approx(row.topk(num_alternatives).values.tolist(), abs=TOLERANCE)
        assert values == pytest.approx([row[token].item() for token, _ in alternatives], abs=TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention_backend", ["auto", "torch_sdpa"])
def test_every_family_and_decoder_scores_as_a_plain_pass(
    folders: dict[str, Path], family: str, attention_backend: str
) -> None:
    engine = engine_of(folders[family], attention_backend=attention_backend)
    prompts = tiny_prompts([1, 2, 65, 128])
    events = run(engine, [EngineRequest(str(i), prompt, SCORED) for i, prompt in enumerate(prompts)])
    model = load_reference(folders[family])
    for own, prompt in zip(events.values(), prompts, strict=True):
        assert_equals_a_plain_pass(model, prompt, scores_in(own))
        assert sum(len(event.token_ids) for event in own) == SCORED.max_tokens


@pytest.mark.parametrize("num_logits", [1, 512 * 7])
def test_slices_of_any_size_give_the_same(
    folders: dict[str, Path], num_logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_scores, "NUM_LOGITS_AT_ONCE", num_logits)
    [prompt] = tiny_prompts([50])
    events = run(engine_of(folders["llama"]), [EngineRequest("a", prompt, SCORED)])
    assert_equals_a_plain_pass(load_reference(folders["llama"]), prompt, scores_in(events["a"]))


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
@pytest.mark.parametrize("scheduler_policy", ["chunked_prefill", "default"])
def test_scores_survive_preemption_and_the_cache(
    folders: dict[str, Path], enable_prefix_caching: bool, preemption_mode: str, scheduler_policy: str
) -> None:
    budget = {"chunked_prefill": 24, "default": MAX_MODEL_LEN}[scheduler_policy]
    engine = engine_of(
        folders["llama"],
        num_device_blocks=15,
        num_host_blocks=40,
        max_num_batched_tokens=budget,
        max_num_seqs=8,
        enable_prefix_caching=enable_prefix_caching,
        preemption_mode=preemption_mode,
        scheduler_policy=scheduler_policy,
    )
    prompts = tiny_prompts([70, 33, 90, 48, 16, 100])
    prompts[3] = prompts[2][:48]  # what the cache could give
    params = replace(SCORED, max_tokens=40)
    events = run(engine, [EngineRequest(str(i), prompt, params) for i, prompt in enumerate(prompts)])
    assert engine.totals.num_preemptions_recompute + engine.totals.num_preemptions_swap > 0
    assert engine.totals.num_blocks_hit == 0
    model = load_reference(folders["llama"])
    for own, prompt in zip(events.values(), prompts, strict=True):
        assert_equals_a_plain_pass(model, prompt, scores_in(own))


@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
def test_a_prompt_thrown_out_mid_way_is_scored_once(folders: dict[str, Path], preemption_mode: str) -> None:
    engine = engine_of(
        folders["llama"],
        num_device_blocks=13,
        num_host_blocks=13,
        queue_policy="priority",
        preemption_mode=preemption_mode,
        max_num_batched_tokens=16,
    )
    num_scored: list[int] = []
    logits_of = engine._runner.logits_of

    def counting(places: list[int]) -> torch.Tensor:
        num_scored.append(len(places))
        return logits_of(places)

    engine._runner.logits_of = counting
    long, urgent = tiny_prompts([150, 100])
    engine.add_request(EngineRequest("long", long, SCORED), 0.0)
    assert [event for step in range(4) for event in engine.step(float(step))] == []
    engine.add_request(EngineRequest("urgent", urgent, SCORED, priority=-100), 4.0)
    events: dict[str, list[TokenEvent]] = {"long": [], "urgent": []}
    while engine.has_unfinished():
        for event in engine.step(5.0):
            events[event.request_id].append(event)
    preemptions = [preemption for record in engine.records_since(-1) for preemption in record.preemptions]
    assert [(preemption.victim, preemption.mode) for preemption in preemptions] == [("long", preemption_mode)]
    model = load_reference(folders["llama"])
    for name, prompt in (("long", long), ("urgent", urgent)):
        assert_equals_a_plain_pass(model, prompt, scores_in(events[name]))
    assert sum(num_scored) == len(long) + len(urgent) - 2


def test_a_group_of_answers_scores_its_prompt_once_and_each_goes_on_as_without(folders: dict[str, Path]) -> None:
    [prompt] = tiny_prompts([70])
    params = replace(SCORED, n=3, temperature=1.0, seed=5)
    engine = engine_of(folders["qwen2"])
    scored = run(engine, [EngineRequest("a", prompt, params)])["a"]
    assert_equals_a_plain_pass(load_reference(folders["qwen2"]), prompt, scores_in(scored))
    plain = run(engine, [EngineRequest("a", prompt, replace(params, prompt_logprobs=None))])["a"]
    assert all(event.prompt_logprobs is None for event in plain)
    assert [(event.index, event.token_ids) for event in scored] == [(event.index, event.token_ids) for event in plain]


@pytest.mark.parametrize("n", [1, 2])
def test_without_tokens_to_generate_the_prompt_is_scored_and_that_is_all(folders: dict[str, Path], n: int) -> None:
    prompts = tiny_prompts([1, 40, MAX_MODEL_LEN])
    engine = engine_of(folders["llama"])
    # Any token would end an answer: it must not be told, whatever it is.
    params = replace(SCORED_ALONE, n=n, stop_token_ids=tuple(range(engine.vocab_size)), logprobs=2)
    events = run(engine, [EngineRequest(str(i), prompt, params) for i, prompt in enumerate(prompts)])
    model = load_reference(folders["llama"])
    for own, prompt in zip(events.values(), prompts, strict=True):
        assert [(event.index, event.token_ids, event.finish_reason) for event in own] == [
            (index, [], "length") for index in range(n)
        ]
        assert all(event.logprobs is None for event in own)
        assert_equals_a_plain_pass(model, prompt, scores_in(own))
    with pytest.raises(RequestError, match=f"{MAX_MODEL_LEN + 1} tokens"):
        engine.add_request(EngineRequest("long", [5] * (MAX_MODEL_LEN + 1), SCORED_ALONE), 0.0)


def test_a_prompt_that_fits_no_more_with_a_token_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(RequestError, match=f"at most {MAX_MODEL_LEN - 1} leave room"):
        engine_of(folders["llama"]).add_request(EngineRequest("a", [5] * MAX_MODEL_LEN, SCORED), 0.0)


def test_scores_cost_the_cache_nothing_but_their_own_request(folders: dict[str, Path]) -> None:
    engine = engine_of(folders["llama"])
    [prompt] = tiny_prompts([64])
    plain = replace(SCORED, prompt_logprobs=None)
    run(engine, [EngineRequest("a", prompt, plain)])
    assert run(engine, [EngineRequest("b", prompt, SCORED)])["b"][0].num_cached_tokens == 0
    assert run(engine, [EngineRequest("c", prompt, plain)])["c"][0].num_cached_tokens == 48


def test_a_resumed_answer_does_not_tell_its_prompts_scores_again(folders: dict[str, Path]) -> None:
    engine = engine_of(folders["llama"])
    [prompt] = tiny_prompts([40])
    first = run(engine, [EngineRequest("a", prompt, SCORED)])["a"]
    output = [token_id for event in first for token_id in event.token_ids]
    resumed = run(engine, [EngineRequest("b", prompt, SCORED, output_token_ids=[output[:2]])])["b"]
    assert all(event.prompt_logprobs is None for event in resumed)
    assert [token_id for event in resumed for token_id in event.token_ids] == output[2:]
