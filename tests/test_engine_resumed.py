"""Requests that go on from output they had elsewhere, by the real engine on a tiny model: as if never disturbed."""

from dataclasses import replace

import pytest

from tests.group_runs import Run
from tests.oracle.prompts import tiny_prompts
from tests.tiny_models import VOCAB_SIZE, save_tiny_model
from worker.config import EngineConfig
from worker.engine import Engine
from worker.request_checks import RequestError
from worker.types import EngineRequest, SamplingParams, TokenLogprobs

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_TOKENS = 20
[PROMPT] = tiny_prompts([21])
PARAMS = SamplingParams(
    max_tokens=NUM_TOKENS,
    n=3,
    seed=5,
    logprobs=2,
    min_tokens=9,
    presence_penalty=0.8,
    frequency_penalty=0.4,
    repetition_penalty=1.2,
)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return EngineConfig(
        model=str(save_tiny_model(tmp_path_factory.mktemp("tiny"), "llama")),
        dtype="float32",
        device="cpu",
        max_model_len=96,
        max_num_batched_tokens=32,
        block_size=8,
        num_device_blocks=100,
        chunk_alignment=1,
    )


@pytest.fixture(scope="module")
def engine(config: EngineConfig) -> Engine:
    return Engine(config)


class Answered:
    """Tokens, log-probabilities and the finish reason of each sample that ran."""

    def __init__(self, engine: Engine, request: EngineRequest) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[TokenLogprobs]] = {}
        self.reasons: dict[int, str] = {}
        engine.add_request(request, 0.0)
        while engine.has_unfinished():
            for event in engine.step(0.0):
                assert event.index not in self.reasons
                self.tokens.setdefault(event.index, []).extend(event.token_ids)
                self.logprobs.setdefault(event.index, []).extend(event.logprobs or [])
                if event.finish_reason is not None:
                    self.reasons[event.index] = event.finish_reason


def stopping(engine: Engine, params: SamplingParams) -> SamplingParams:
    """With a stop token that some sample has early, where `min_tokens` forbids it, and later, where it ends it."""
    answers = Answered(engine, EngineRequest("probe", PROMPT, replace(params, ignore_eos=True)))
    token_id = answers.tokens[1][13]
    return replace(params, stop_token_ids=(token_id,))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_cut_gives_the_tokens_log_probabilities_and_ends_of_the_undisturbed_run(
    engine: Engine, temperature: float
) -> None:
    params = stopping(engine, replace(PARAMS, temperature=temperature))
    whole = Answered(engine, EngineRequest("whole", PROMPT, params))
    assert set(whole.reasons.values()) == ({"stop"} if temperature == 0.0 else {"stop", "length"})
    lengths = {index: len(tokens) for index, tokens in whole.tokens.items()}
    for cut in range(max(lengths.values())):
        ended = tuple(index for index in range(3) if lengths[index] <= cut)
        outputs = [whole.tokens[index][:cut] for index in range(3)]
        resumed = Answered(engine, EngineRequest("r", PROMPT, params, outputs, ended_samples=ended))
        for index in range(3):
            if index in ended:
                assert index not in resumed.tokens
                continue
            assert resumed.tokens[index] == whole.tokens[index][cut:]
            assert resumed.reasons[index] == whole.reasons[index]
            for (one, best), (other, other_best) in zip(
                resumed.logprobs[index], whole.logprobs[index][cut:], strict=True
            ):
                assert one == pytest.approx(other, abs=1e-4)
                assert [token_id for token_id, _ in best] == [token_id for token_id, _ in other_best]
    engine.check_integrity()


def test_nothing_is_asked_of_a_sample_that_has_ended(engine: Engine) -> None:
    params = replace(PARAMS, ignore_eos=True)
    whole = Run(engine, [EngineRequest("r", PROMPT, params)]).answers
    outputs = [whole["r", index][:6] for index in range(3)]
    outputs[1] = whole["r", 1]  # all of it: longer than any answer may become from here
    run = Run(engine, [EngineRequest("r", PROMPT, params, outputs, ended_samples=(1,))])
    assert run.answers == {("r", 0): whole["r", 0][6:], ("r", 2): whole["r", 2][6:]}
    assert max(record.num_decodes for record in engine.records_since(-1)[-NUM_TOKENS // 2 :]) <= 2


def test_answers_that_have_outgrown_the_pool_end_with_length_elsewhere_too(config: EngineConfig) -> None:
    small = Engine(replace(config, num_device_blocks=16))
    params = SamplingParams(max_tokens=60, n=6, seed=3, ignore_eos=True)
    whole = Run(small, [EngineRequest("r", PROMPT, params)])
    answers = [whole.answers["r", index] for index in range(6)]
    assert set(whole.reasons.values()) == {"length"}
    [length] = {len(answer) for answer in answers}
    assert length < 60
    for cut in (length - 1, length - 2):
        run = Run(small, [EngineRequest("r", PROMPT, params, [answer[:cut] for answer in answers])])
        assert [run.answers["r", index] for index in range(6)] == [answer[cut:] for answer in answers]
    # Its first worker had more room.
    longer = Run(Engine(config), [EngineRequest("r", PROMPT, params)]).answers
    run = Run(small, [EngineRequest("r", PROMPT, params, [longer["r", index][:40] for index in range(6)])])
    assert set(run.reasons.values()) == {"length"}
    assert not any(run.answers.values())


@pytest.mark.parametrize(
    ("outputs", "ended"), [([[1]], ()), ([[1], [1], [1]], (0, 1, 2)), ([[1] * NUM_TOKENS, [1], [1]], ())]
)
def test_what_cannot_go_on_is_refused(engine: Engine, outputs: list[list[int]], ended: tuple[int, ...]) -> None:
    with pytest.raises(RequestError):
        engine.add_request(EngineRequest("r", PROMPT, PARAMS, outputs, ended_samples=ended), 0.0)
    assert not engine.has_unfinished()


@pytest.mark.parametrize("strange", [-1, VOCAB_SIZE, 2**40])
def test_ids_that_are_no_tokens_are_refused_in_prompts_and_outputs(engine: Engine, strange: int) -> None:
    for prompt, outputs in (([*PROMPT, strange], []), (PROMPT, [[1, strange], [1], [1]])):
        with pytest.raises(RequestError, match=f"token id {strange} is not in the vocabulary of {VOCAB_SIZE}"):
            engine.add_request(EngineRequest("r", prompt, PARAMS, outputs), 0.0)
    assert not engine.has_unfinished()
