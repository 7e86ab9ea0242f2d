from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.tiny_models import VOCAB_SIZE, load_reference, save_tiny_model
from tests.tiny_tokenizer import save_tiny_tokenizer
from worker.config import EngineConfig
from worker.engine import EngineTotals
from worker.llm import LLM
from worker.request_checks import RequestError
from worker.sampling_choices import SamplingChoices
from worker.text import Tokenizer
from worker.types import EngineRequest, TokenEvent

PROMPTS = ["The cat sat on the mat.", "a", "To be, or not to be: that is the question. " * 4, "日本語 🙂"]
GREEDY = SamplingChoices(max_tokens=12, temperature=0.0, ignore_eos=True)
CONFIG = EngineConfig(
    dtype="float32",
    device="cpu",
    max_model_len=256,
    num_device_blocks=80,
    max_num_batched_tokens=64,
    num_threads=1,
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models are slower on several threads. The number is the whole process's, so it is put back."""
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-llama")
    return save_tiny_tokenizer(save_tiny_model(folder, "llama"))


@pytest.fixture(scope="module")
def config(model_folder: Path) -> EngineConfig:
    return replace(CONFIG, model=str(model_folder))


@pytest.fixture(scope="module")
def llm(config: EngineConfig) -> LLM:
    return LLM(config)


# --- the real engine, on a tiny model


def test_greedy_completions_are_those_of_a_plain_transformers_loop(llm: LLM, model_folder: Path) -> None:
    reference, tokenizer = load_reference(model_folder), Tokenizer(model_folder)
    for completion in llm.generate(PROMPTS, GREEDY):
        token_ids = tokenizer.encode(completion.prompt)
        with torch.no_grad():
            for token_id in completion.token_ids:
                scores = reference(torch.tensor([token_ids])).logits[0, -1]
                assert scores.max() - scores[token_id] < 5e-4
                token_ids.append(token_id)
        assert len(completion.token_ids) == 12
        assert completion.text == tokenizer.decode(completion.token_ids)
        assert completion.finish_reason == "length"


def test_completions_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    completions = llm.generate(PROMPTS, GREEDY)
    assert [completion.prompt for completion in completions] == PROMPTS
    assert [completion.token_ids for completion in llm.generate(PROMPTS[::-1], GREEDY)] == [
        completion.token_ids for completion in completions[::-1]
    ]


def test_token_prompts_give_what_their_text_gives(llm: LLM, model_folder: Path) -> None:
    tokenizer = Tokenizer(model_folder)
    by_text = llm.generate(PROMPTS, GREEDY)
    by_tokens = llm.generate([tokenizer.encode(prompt) for prompt in PROMPTS], GREEDY)
    assert by_tokens == by_text


def test_chat_goes_through_the_chat_template(llm: LLM, model_folder: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    (answer,) = llm.chat([messages], GREEDY)
    assert answer.prompt == "<bos>user:hi<eos><bos>assistant:"
    assert answer.prompt_token_ids == Tokenizer(model_folder).encode_chat(messages)
    assert answer.token_ids == llm.generate([answer.prompt_token_ids], GREEDY)[0].token_ids


def test_seeded_sampling_is_the_same_alone_in_a_batch_and_under_forced_preemption(
    llm: LLM, config: EngineConfig
) -> None:
    choices = SamplingChoices(max_tokens=40, temperature=1.0, seed=42, ignore_eos=True)
    prompts = [f"{number} " * 8 for number in range(5)]
    alone = [llm.generate([prompt], choices)[0].token_ids for prompt in prompts]
    assert [completion.token_ids for completion in llm.generate(prompts, choices)] == alone
    for mode in ("recompute", "swap"):
        small = LLM(replace(config, max_model_len=128, num_device_blocks=10, num_host_blocks=16, preemption_mode=mode))
        assert [completion.token_ids for completion in small.generate(prompts, choices)] == alone
        assert small.stats()["preemptions"][mode] > 0


def test_unseeded_prompts_draw_different_answers(llm: LLM) -> None:
    choices = SamplingChoices(max_tokens=20, temperature=2.0, ignore_eos=True)
    answers = [tuple(completion.token_ids) for completion in llm.generate(["same"] * 6, choices)]
    assert len(set(answers)) == 6


def test_logprobs_come_with_every_token(llm: LLM) -> None:
    (completion,) = llm.generate(["abc"], replace(GREEDY, logprobs=2))
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids)
    for token_id, (own, alternatives) in zip(completion.token_ids, completion.logprobs, strict=True):
        assert alternatives[0] == (token_id, own)


def test_prompts_are_scored_with_and_without_answers(llm: LLM, model_folder: Path) -> None:
    reference, tokenizer = load_reference(model_folder), Tokenizer(model_folder)
    token_ids = tokenizer.encode("The cat sat.")
    with torch.no_grad():
        expected = reference(torch.tensor([token_ids])).logits[0].log_softmax(dim=-1)
    wanted = [expected[place, token_id].item() for place, token_id in enumerate(token_ids[1:])]
    for choices in (
        replace(GREEDY, prompt_logprobs=2, n=2, temperature=1.0),
        SamplingChoices(max_tokens=0, prompt_logprobs=0),
    ):
        for completion in llm.generate(["The cat sat."], choices):
            assert completion.prompt_logprobs is not None
            assert [own for own, _, _ in completion.prompt_logprobs] == pytest.approx(wanted, abs=1e-3)
            assert len(completion.token_ids) == choices.max_tokens
            assert completion.finish_reason == "length"
    assert llm.generate(["a"], GREEDY)[0].prompt_logprobs is None


def test_a_stop_token_is_in_the_ids_and_not_in_the_text(llm: LLM, model_folder: Path) -> None:
    free = llm.generate(["abc"], GREEDY)[0]
    stop_token_id = free.token_ids[5]
    first = free.token_ids.index(stop_token_id)
    (stopped,) = llm.generate(["abc"], replace(GREEDY, stop_token_ids=(stop_token_id,)))
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert stopped.text == Tokenizer(model_folder).decode(free.token_ids[:first])


def test_an_answer_ends_at_the_model_length(llm: LLM) -> None:
    (completion,) = llm.generate(["x" * 250], replace(GREEDY, max_tokens=None))
    assert len(completion.token_ids) == 256 - 250
    assert completion.finish_reason == "length"
    assert len(llm.generate(["x" * 255], GREEDY)[0].token_ids) == 1


def test_a_prompt_that_can_never_fit_is_refused_with_both_numbers_and_nothing_is_left(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"prompt 2 of 2: .* 300 .* 256"):
        llm.generate(["fits", "x" * 300], GREEDY)
    assert len(llm.generate(["fits"], GREEDY)) == 1


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE, 2**63])
def test_token_ids_outside_the_vocabulary_are_refused(llm: LLM, token_id: int) -> None:
    with pytest.raises(RequestError, match=str(token_id)):
        llm.generate([[5, token_id]], GREEDY)


# --- several answers


def test_several_answers_to_a_prompt_come_in_a_row_with_their_indices(llm: LLM) -> None:
    choices = SamplingChoices(max_tokens=12, temperature=1.0, seed=5, n=3, ignore_eos=True)
    completions = llm.generate(PROMPTS, choices)
    assert [(completion.prompt, completion.index) for completion in completions] == [
        (prompt, index) for prompt in PROMPTS for index in range(3)
    ]
    for place in range(len(PROMPTS)):
        assert len({tuple(completion.token_ids) for completion in completions[3 * place : 3 * place + 3]}) == 3
    alone = llm.generate(PROMPTS, replace(choices, n=1))
    assert [completion.token_ids for completion in completions[::3]] == [completion.token_ids for completion in alone]


def test_beams_are_the_best_answers_of_a_search(llm: LLM) -> None:
    beams = llm.generate(PROMPTS[:2], SamplingChoices(max_tokens=6, beam_width=4, n=2, ignore_eos=True))
    assert [completion.index for completion in beams] == [0, 1, 0, 1]
    assert [len(completion.token_ids) for completion in beams] == [6] * 4
    assert {completion.finish_reason for completion in beams} == {"length"}
    one_beam = llm.generate(PROMPTS[:2], SamplingChoices(max_tokens=6, beam_width=1, ignore_eos=True))
    greedy = llm.generate(PROMPTS[:2], replace(GREEDY, max_tokens=6))
    assert [c.token_ids for c in one_beam] == [c.token_ids for c in greedy]


def test_no_prompts_give_no_completions(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


def test_stats_count_what_the_engine_did(config: EngineConfig) -> None:
    llm = LLM(config)
    llm.generate(["x" * 100], replace(GREEDY, max_tokens=3))
    # 100 tokens under a budget of 64 are two chunks, the second of which gives the first of three tokens.
    assert llm.stats() == {
        "steps": 4,
        "prefill_chunks": 2,
        "preemptions": {"recompute": 0, "swap": 0},
        "swapped_blocks": {"out": 0, "in": 0},
        "discarded_tokens": 0,
        # 6 whole blocks of 16 were looked for in a cache that held nothing.
        "prefix_cache": {"queried_blocks": 6, "hit_blocks": 0},
    }
    llm.generate(["x" * 100], replace(GREEDY, max_tokens=3))
    assert llm.stats()["prefix_cache"] == {"queried_blocks": 12, "hit_blocks": 6}


# --- an engine that goes wrong


class InterruptedEngine:
    """Ends the first request with an error in its first step and raises in its second."""

    vocab_size = VOCAB_SIZE
    max_model_len = 64
    generation_defaults: dict[str, float] = {}  # noqa: RUF012

    def __init__(self, folder: Path) -> None:
        self.tokenizer_folder = folder
        self.totals = EngineTotals()
        self.requests: list[EngineRequest] = []
        self.aborted: list[str] = []

    def add_request(self, request: EngineRequest, now: float) -> None:
        self.requests.append(request)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def has_unfinished(self) -> bool:
        return True

    def step(self, now: float) -> list[TokenEvent]:
        self.totals.num_steps += 1
        if self.totals.num_steps == 2:
            raise KeyboardInterrupt
        stale = TokenEvent("of-a-call-before", 0, [], finish_reason="abort")
        return [stale, TokenEvent(self.requests[0].request_id, 0, [], finish_reason="error", error="no room")]


def test_an_interrupted_call_aborts_what_is_unfinished_and_only_that(model_folder: Path) -> None:
    engine = InterruptedEngine(model_folder)
    llm = LLM(EngineConfig(), build_engine=lambda _: engine)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c"], GREEDY)
    assert engine.aborted == [request.request_id for request in engine.requests[1:]]


def test_an_ended_request_says_why_and_events_of_earlier_calls_are_passed_over(model_folder: Path) -> None:
    engine = InterruptedEngine(model_folder)
    (completion,) = LLM(EngineConfig(), build_engine=lambda _: engine).generate(["a"], GREEDY)
    assert (completion.finish_reason, completion.error, completion.text) == ("error", "no room", "")


def test_progress_reports_every_step(llm: LLM) -> None:
    seen: list[tuple[int, int, int]] = []
    llm.generate(["ab", "cd"], replace(GREEDY, max_tokens=3), lambda *numbers: seen.append(numbers))
    assert seen == [(0, 2, 2), (0, 2, 4), (2, 2, 6)]
