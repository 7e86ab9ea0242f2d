"""The HTTP API over a fake worker: log-probabilities of prompts, echoed and in vLLM's field."""

from typing import Any

import pytest

from tests.api_client import MAX_MODEL_LEN, answering, stream_events
from tests.tiny_tokenizers import KINDS

PROMPT = "the cat 😀 sat"


@pytest.mark.parametrize("stream", [False, True])
def test_an_echoed_prompt_has_its_logprobs_before_those_of_the_answer(stream: bool) -> None:
    api = answering(" on the mat")
    response = api.complete(prompt=PROMPT, echo=True, logprobs=1, stream=stream)
    choices = [event["choices"][0] for event in stream_events(response)[:-1]] if stream else response.json()["choices"]
    token_ids = api.worker.requests[0].prompt_token_ids
    num_prompt_tokens, num_tokens = len(token_ids), len(token_ids) + len(api.worker.answer_ids) + 1
    parts = [choice["logprobs"] for choice in choices]
    logprobs = {name: [item for part in parts for item in part[name]] for name in parts[0]}
    text = "".join(choice["text"] for choice in choices)
    assert text == PROMPT + " on the mat"
    assert {len(items) for items in logprobs.values()} == {num_tokens}
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:num_prompt_tokens] == [-0.5 * place for place in range(1, num_prompt_tokens)]
    assert logprobs["token_logprobs"][num_prompt_tokens:] == [-0.5] * (num_tokens - num_prompt_tokens)
    best, own = api.tokenizer.token_text(5)[0], api.tokenizer.token_text(token_ids[1])[0]
    assert logprobs["top_logprobs"][1] == {best: -0.125, own: -0.5}
    placed = list(zip(logprobs["tokens"], logprobs["text_offset"], strict=True))[:-1]
    assert placed[0][1] == 0
    assert all(text[offset:].startswith(token) for token, offset in placed if "\ufffd" not in token)
    if stream:
        assert len(parts[0]["tokens"]) > num_prompt_tokens
    assert api.worker.requests[0].params.prompt_logprobs == 1


def test_no_tokens_and_an_echo_score_the_prompt_alone() -> None:
    api = answering("never said")
    body = api.complete(prompt=[20, 21, 22], echo=True, logprobs=0, max_tokens=0).json()
    choice = body["choices"][0]
    assert choice["text"] == api.tokenizer.decode([20, 21, 22])
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -1.0]
    assert body["usage"]["completion_tokens"] == 0
    assert api.metrics.finished == [("length", 3)]
    events = stream_events(api.complete(prompt=[20, 21, 22], echo=True, logprobs=0, max_tokens=0, stream=True))
    assert [event["choices"] for event in events[:-1]] == [[choice]]


@pytest.mark.parametrize("stream", [False, True])
def test_no_tokens_without_an_echo_give_an_empty_answer(stream: bool) -> None:
    api = answering("never said")
    response = api.complete(max_tokens=0, stream=stream)
    [choice] = stream_events(response)[0]["choices"] if stream else response.json()["choices"]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == ("", "length", None)
    assert api.worker.requests[0].params.prompt_logprobs is None


def test_a_prompt_may_fill_the_context_where_nothing_is_generated() -> None:
    api = answering("")
    assert api.complete(prompt=[20] * MAX_MODEL_LEN, max_tokens=0).status_code == 200
    for prompt, max_tokens in (([20] * (MAX_MODEL_LEN + 1), 0), ([20] * MAX_MODEL_LEN, 1)):
        error = api.complete(prompt=prompt, max_tokens=max_tokens).json()["error"]
        assert (error["code"], str(len(prompt)) in error["message"]) == ("context_length_exceeded", True)


def test_prompt_logprobs_name_ids_ranks_and_texts() -> None:
    api = answering(" sat")
    choice = api.complete(prompt=[20, 21, 5], prompt_logprobs=2).json()["choices"][0]
    text = {token_id: api.tokenizer.token_text(token_id)[0] for token_id in (20, 21, 5, 6)}
    assert choice["prompt_logprobs"] == [
        None,
        {
            "21": {"logprob": -0.5, "rank": 1, "decoded_token": text[21]},
            "5": {"logprob": -0.125, "rank": 1, "decoded_token": text[5]},
            "6": {"logprob": -9999.0, "rank": 2, "decoded_token": text[6]},
        },
        {
            "5": {"logprob": -1.0, "rank": 2, "decoded_token": text[5]},
            "6": {"logprob": -9999.0, "rank": 2, "decoded_token": text[6]},
        },
    ]
    assert choice["logprobs"] is None


def test_both_kinds_of_prompt_logprobs_show_as_many_as_each_was_asked_for() -> None:
    api = answering(" sat")
    choice = api.complete(prompt=[20, 21], prompt_logprobs=0, echo=True, logprobs=3, n=2).json()["choices"][1]
    assert api.worker.requests[0].params.prompt_logprobs == 3
    assert list(choice["prompt_logprobs"][1]) == ["21"]
    assert len(choice["logprobs"]["top_logprobs"][1]) == 4


def test_a_chat_has_the_prompts_logprobs_beside_its_choices() -> None:
    api = answering(" sat")
    body = api.chat(prompt_logprobs=0, n=2).json()
    assert len(body["prompt_logprobs"]) == len(api.worker.requests[0].prompt_token_ids)
    assert body["prompt_logprobs"][0] is None
    assert "prompt_logprobs" not in api.chat().json()
    assert all("prompt_logprobs" not in choice for choice in body["choices"])


@pytest.mark.parametrize("route", ["complete", "chat"])
@pytest.mark.parametrize("fields", [{"stream": True}, {"use_beam_search": True}])
def test_prompt_logprobs_are_neither_streamed_nor_of_beams(route: str, fields: dict[str, Any]) -> None:
    response = getattr(answering("a"), route)(prompt_logprobs=0, **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt_logprobs")


@pytest.mark.parametrize("logprob", [float("-inf"), float("nan")])
@pytest.mark.parametrize("stream", [True, False])
def test_impossible_tokens_of_a_prompt_show_a_finite_logprob(logprob: float, stream: bool) -> None:
    # vllm-project/vllm#10234: what JSON cannot write made the answer a 500.
    api = answering("the", logprob=logprob)
    response = api.complete(echo=True, logprobs=2, temperature=1, top_k=1, stream=stream)
    assert response.status_code == 200
    assert "-9999.0" in response.text
    assert "Infinity" not in response.text
    assert "NaN" not in response.text


def test_best_of_ranks_by_the_answers_alone_and_keeps_the_prompts_logprobs() -> None:
    api = answering("")
    api.worker.sample_ids = [api.tokenizer.encode("the"), api.tokenizer.encode("cat")]
    api.worker.sample_logprobs = [[-3.0], [-0.1]]
    choice = api.complete(best_of=2, echo=True, logprobs=0).json()["choices"][0]
    assert choice["text"] == "the catcat"
    num_prompt_tokens = len(api.worker.requests[0].prompt_token_ids)
    assert choice["logprobs"]["token_logprobs"][1:num_prompt_tokens] == [
        -0.5 * place for place in range(1, num_prompt_tokens)
    ]


def test_a_special_token_of_the_prompt_takes_no_room_in_the_echoed_text() -> None:
    api = answering(" sat", "sentencepiece_bpe")
    choice = api.complete(prompt="the cat", echo=True, logprobs=0, max_tokens=0).json()["choices"][0]
    assert choice["logprobs"]["tokens"][0] == "<s>"
    assert choice["logprobs"]["text_offset"][:2] == [0, 0]
    assert choice["text"] == "the cat"


@pytest.mark.parametrize("skip_special_tokens", [None, True, False])
def test_control_tokens_of_the_prompt_are_echoed_and_take_their_room(skip_special_tokens: bool | None) -> None:
    prompt = "<|im_start|>user\nhi<|im_end|> yo 😀"
    api = answering(" sat")
    scored = {"echo": True, "logprobs": 0, "max_tokens": 0, "skip_special_tokens": skip_special_tokens}
    of_text = api.complete(prompt=prompt, **scored).json()["choices"][0]
    of_ids = api.complete(prompt=api.worker.requests[0].prompt_token_ids, **scored).json()["choices"][0]
    assert of_text == of_ids
    assert of_text["text"] == prompt
    logprobs = of_text["logprobs"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert "\ufffd" in token or prompt[offset:].startswith(token)
    assert logprobs["text_offset"][1] == len("<|im_start|>")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt", ["the cat sat", "The  <s>CAT</s> sat", "hello 😀 moon", " the"])
def test_offsets_are_places_in_the_echoed_text_whatever_the_tokenizer(kind: str, prompt: str) -> None:
    api = answering(" sat", kind)
    scored = {"echo": True, "logprobs": 0, "max_tokens": 0}
    for sent in (prompt, None):
        asked: Any = api.worker.requests[0].prompt_token_ids if sent is None else sent
        choice = api.complete(prompt=asked, **scored).json()["choices"][0]
        tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
        assert choice["text"] == (sent or api.tokenizer.decode(asked, skip_special_tokens=False))
        assert offsets == sorted(offsets)
        assert 0 <= offsets[0] <= offsets[-1] <= len(choice["text"])
        if sent is None:
            continue
        for token, offset in zip(tokens, offsets, strict=True):
            is_written = token.strip() in ("<s>", "</s>") and "<s>" in prompt and offset > 0
            assert not is_written or prompt[offset:].lstrip().startswith(token.strip()), (token, offset)
