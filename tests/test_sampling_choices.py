"""What a user of `LLM` may choose, what fills in the rest, and what is refused by name."""

import pytest

from tests.tiny_models import VOCAB_SIZE
from worker.sampling_choices import SamplingChoices, SamplingError
from worker.types import BeamParams, SamplingParams

DEFAULTS = {"temperature": 0.6, "top_p": 0.9, "top_k": 50}


def resolved(choices: SamplingChoices, defaults: dict[str, float] | None = None, room: int = 100) -> SamplingParams:
    return choices.resolve(defaults or {}, max_tokens=room, vocab_size=VOCAB_SIZE, random_seed=77)


def test_choices_come_before_the_models_defaults_and_those_before_openais() -> None:
    params = resolved(SamplingChoices(top_k=0), DEFAULTS)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.6, 0.9, 0, 0.0)
    params = resolved(SamplingChoices())
    assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == (1.0, 1.0, 0, 1.0)
    assert resolved(SamplingChoices(temperature=0.0), DEFAULTS).temperature == 0.0


def test_the_seed_is_the_users_or_else_random() -> None:
    assert resolved(SamplingChoices(seed=0)).seed == 0
    assert resolved(SamplingChoices(seed=-1)).seed == 2**63 - 1
    assert resolved(SamplingChoices()).seed == 77


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("temperature", -0.1),
        ("temperature", 999999.0),
        ("temperature", float("nan")),
        ("top_p", -1.0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("min_p", 2.0),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 3.0),
        ("frequency_penalty", -3.0),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", VOCAB_SIZE + 1),
        ("logprobs", -1),
        ("logprobs", VOCAB_SIZE + 1),
        ("min_tokens", -1),
        ("n", 0),
        ("beam_width", 0),
        ("beam_width", VOCAB_SIZE + 1),
        ("length_penalty", 2.0),
        ("early_stopping", True),
    ],
)
def test_choices_out_of_range_are_refused_by_name(option: str, value: float) -> None:
    with pytest.raises(SamplingError, match=f"^{option}: ") as caught:
        resolved(SamplingChoices(**{option: value}))
    assert caught.value.option == option


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("temperature", 0.5),
        ("top_p", 0.9),
        ("top_k", 3),
        ("min_p", 0.1),
        ("repetition_penalty", 1.1),
        ("presence_penalty", 1.0),
        ("frequency_penalty", 1.0),
        ("logprobs", 0),
        ("prompt_logprobs", 0),
        ("min_tokens", 1),
        ("length_penalty", 11.0),
        ("early_stopping", "always"),
    ],
)
def test_what_does_not_go_with_beams_is_refused_by_name(option: str, value: float | str) -> None:
    with pytest.raises(SamplingError, match=f"^{option}: "):
        resolved(SamplingChoices(beam_width=4, **{option: value}))


def test_beams_leave_the_models_own_sampling_defaults_out() -> None:
    params = resolved(SamplingChoices(beam_width=4, n=2, length_penalty=0.5, early_stopping="never"), DEFAULTS)
    assert params.beam == BeamParams(4, 0.5, "never")
    assert (params.n, params.temperature, params.top_k, params.max_tokens) == (2, 1.0, 0, 100)
