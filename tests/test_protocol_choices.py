"""How many answers a request asks for: `n`, `best_of` and beam search, and what does not go with them."""

from typing import Any

import pytest

from deployments.protocol.requests import ChatRequest, CompletionRequest
from tests.test_protocol import MESSAGES, chat, completion, param_of, params


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", ["x"]),
        ("temperature", 0.7),
        ("top_p", 0.9),
        ("top_k", 5),
        ("min_p", 0.1),
        ("min_tokens", 2),
        ("presence_penalty", 1.0),
        ("frequency_penalty", 1.0),
        ("repetition_penalty", 1.1),
        ("logit_bias", {"5": 1}),
        ("logprobs", 0),
        ("logprobs", 1),
        ("n", 5),
        ("best_of", 5),
    ],
)
def test_what_does_not_go_with_beam_search_is_refused_by_name(field: str, value: Any) -> None:
    body = {"model": "m", "prompt": "hi", "use_beam_search": True, "beam_width": 4, field: value}
    assert param_of(body, CompletionRequest) == (field if field not in ("n", "best_of") else "beam_width")


def test_chat_logprobs_do_not_go_with_beam_search_either() -> None:
    body = {"model": "m", "messages": MESSAGES, "use_beam_search": True}
    assert param_of(body | {"logprobs": True}, ChatRequest) == "logprobs"
    assert chat(use_beam_search=True, logprobs=False).use_beam_search


@pytest.mark.parametrize(
    ("fields", "width", "n"),
    [
        ({}, 2, 1),
        ({"n": 3}, 3, 3),
        ({"n": 2, "best_of": 5}, 5, 2),
        ({"n": 2, "beam_width": 6}, 6, 2),
        ({"n": 2, "best_of": 3, "beam_width": 6}, 6, 2),
        ({"beam_width": 1}, 1, 1),
        ({"temperature": 0}, 2, 1),
        ({"temperature": 1, "top_p": 1, "stop": "", "logit_bias": {}}, 2, 1),
    ],
)
def test_the_width_of_a_beam_search_covers_what_is_asked_for(fields: dict[str, Any], width: int, n: int) -> None:
    request = params(completion(use_beam_search=True, **fields), temperature=0.6, repetition_penalty=1.3)
    assert request.beam is not None
    assert (request.beam.width, request.n) == (width, n)
    assert request.repetition_penalty == 1.0


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_the_options_of_a_beam_search_reach_the_engine(early_stopping: bool | str) -> None:
    fields = {"length_penalty": 0.0, "early_stopping": early_stopping, "max_tokens": 7, "stop_token_ids": [3]}
    request = params(chat(use_beam_search=True, **fields))
    assert request.beam is not None
    assert (request.beam.length_penalty, request.beam.early_stopping) == (0.0, early_stopping)
    assert (request.max_tokens, request.stop_token_ids) == (7, (3,))


def test_best_of_generates_all_and_needs_their_logprobs() -> None:
    assert params(completion(n=2)).logprobs is None
    assert (params(completion(n=2)).n, params(completion(n=2, best_of=2)).logprobs) == (2, None)
    ranked = params(completion(n=2, best_of=4))
    assert (ranked.n, ranked.logprobs) == (4, 0)
    assert params(completion(n=2, best_of=4, logprobs=3)).logprobs == 3


@pytest.mark.parametrize("stream", [True, False])
def test_best_of_is_at_least_n_and_above_it_not_streamed(stream: bool) -> None:
    body = {"model": "m", "prompt": "hi", "n": 3, "stream": stream}
    assert param_of(body | {"best_of": 2}, CompletionRequest) == "best_of"
    assert completion(n=3, best_of=3, stream=stream).num_candidates == 3
    if stream:
        assert param_of(body | {"best_of": 4}, CompletionRequest) == "best_of"
    else:
        assert completion(**(body | {"best_of": 4})).is_ranked
