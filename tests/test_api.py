"""The HTTP API over a fake worker: whole and streamed answers, finish reasons, usage, log-probabilities, limits."""

import json
from typing import Any

import pytest

from tests.api_client import MODEL, answering, stream_events
from tests.fake_worker import FakeWorker
from tests.tiny_tokenizers import tokenizer_of

TEXT = "the dog sat 😀 สวัสดี"


def joined(events: list[Any]) -> str:
    choices = [choice for event in events if event != "[DONE]" for choice in event["choices"]]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


def test_a_completion_has_text_usage_and_finish_reason() -> None:
    api = answering(TEXT)
    body = api.complete().json()
    num_tokens = len(api.worker.answer_ids) + 1
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["model"] == MODEL
    assert body["choices"] == [{"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop"}]
    num_prompt_tokens = len(api.tokenizer.encode("the cat"))
    assert body["usage"] == {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_a_chat_answer_is_a_message_and_its_prompt_is_the_templates() -> None:
    api = answering(TEXT)
    body = api.chat().json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["choices"][0]["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    prompt_ids = api.worker.requests[0].prompt_token_ids
    assert prompt_ids == api.tokenizer.encode_chat([{"role": "user", "content": "the cat"}])
    assert body["usage"]["prompt_tokens"] == len(prompt_ids)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece_bpe", "wordpiece"])
@pytest.mark.parametrize("tokens_per_frame", [1, 3])
def test_streamed_text_equals_the_whole_answer(kind: str, tokens_per_frame: int) -> None:
    api = answering(TEXT, kind, tokens_per_frame=tokens_per_frame)
    assert joined(stream_events(api.complete(stream=True))) == api.complete().json()["choices"][0]["text"]
    whole = api.chat().json()["choices"][0]["message"]["content"]
    events = stream_events(api.chat(stream=True))
    assert joined(events) == whole
    assert all("\ufffd" not in json.dumps(event, ensure_ascii=False) for event in events)


def test_a_chat_stream_begins_with_the_role_and_ends_with_done() -> None:
    events = stream_events(answering("the cat").chat(stream=True))
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert events[-1] == "[DONE]"
    assert {event["object"] for event in events[:-1]} == {"chat.completion.chunk"}
    assert len({(event["id"], event["created"]) for event in events[:-1]}) == 1


@pytest.mark.parametrize("route", ["complete", "chat"])
def test_finish_reason_is_null_until_the_last_chunk_of_a_choice(route: str) -> None:
    events = stream_events(getattr(answering(TEXT), route)(stream=True))[:-1]
    reasons = [choice["finish_reason"] for event in events for choice in event["choices"]]
    assert len(reasons) > 3
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]


@pytest.mark.parametrize("route", ["complete", "chat"])
def test_an_answer_cut_by_max_tokens_finishes_with_length(route: str) -> None:
    api = answering(TEXT)
    body = getattr(api, route)(max_tokens=5).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 5
    events = stream_events(getattr(api, route)(max_tokens=5, stream=True))
    assert events[-2]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("options", [{}, {"stream_options": None}, {"stream_options": {}}])
def test_no_usage_chunk_comes_unasked(options: dict[str, Any]) -> None:
    for stream_options in (options, {"stream_options": {"include_usage": False}}):
        events = stream_events(answering("the cat").chat(stream=True, **stream_options))[:-1]
        assert all(len(event["choices"]) == 1 and "usage" not in event for event in events)


def test_a_usage_chunk_has_no_choices_and_comes_last() -> None:
    api = answering("the cat")
    *chunks, usage, done = stream_events(api.complete(stream=True, stream_options={"include_usage": True}))
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"] == api.complete().json()["usage"]
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks)


def test_no_part_of_a_stop_string_leaves_and_the_worker_is_told_where_it_ended() -> None:
    api = answering("hello moon DEFGHIJ the dog sat too", is_endless=True)
    response = api.chat(stream=True, stop=["DEFGHIJ"], stream_options={"include_usage": True}, logprobs=True)
    events = stream_events(response)
    assert joined(events) == "hello moon "
    *_, last, usage, _ = events
    assert last["choices"][0]["finish_reason"] == "stop"
    [(request_id, index, num_tokens)] = api.worker.finished
    assert (request_id, index) == (api.worker.requests[0].request_id, 0)
    text = api.tokenizer.decode(api.worker.answer_ids[:num_tokens])
    assert text.endswith("DEFGHIJ")
    assert "DEFGHIJ" not in api.tokenizer.decode(api.worker.answer_ids[: num_tokens - 1])
    assert usage["usage"]["completion_tokens"] == num_tokens == api.metrics.num_tokens
    logprobs = [entry for event in events[1:-2] for entry in event["choices"][0]["logprobs"]["content"]]
    assert len(logprobs) == num_tokens
    assert api.worker.num_open == 0
    assert api.worker.num_produced <= num_tokens + 1
    assert api.metrics.finished[0][0] == "stop"


def test_a_stop_string_that_does_not_complete_is_released() -> None:
    assert answering("ABC DEFGH").complete(stop=["DEFGHIJ"]).json()["choices"][0]["text"] == "ABC DEFGH"


def test_a_stop_string_can_be_included() -> None:
    choice = answering("one two three").complete(stop="two", include_stop_str_in_output=True).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("one two", "stop")


def test_stop_strings_are_not_looked_for_before_min_tokens() -> None:
    api = answering("\nthe cat sat on the mat\nthe dog")
    body = api.complete(stop="\n", min_tokens=5).json()
    assert body["choices"][0]["text"] == "\nthe cat sat on the mat"
    assert body["usage"]["completion_tokens"] >= 5


def test_a_stop_token_counts_but_is_no_part_of_the_text() -> None:
    tokenizer = tokenizer_of("byte_level")
    ids = tokenizer.encode("the cat")
    api = answering("the")
    api.worker.answer_ids, api.worker.stop_token_id = ids[:-1], ids[-1]
    body = api.complete(stop_token_ids=[ids[-1]]).json()
    assert body["choices"][0]["text"] == tokenizer.decode(ids[:-1])
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == len(ids)


def test_text_before_a_special_stop_token_is_intact() -> None:
    api = answering("the cat.")
    api.worker.stop_token_id = api.tokenizer.encode("<|im_end|>")[0]
    for skip in (True, False):
        assert api.complete(skip_special_tokens=skip).json()["choices"][0]["text"] == "the cat."


def test_broken_bytes_arrive_as_a_replacement_character() -> None:
    api = answering("the 😀")
    api.worker.answer_ids = [*api.worker.answer_ids[:-1], *api.tokenizer.encode("the")]
    assert api.complete().json()["choices"][0]["text"] == "the \ufffdthe"
    assert joined(stream_events(api.complete(stream=True))) == "the \ufffdthe"


@pytest.mark.parametrize("num_logprobs", [0, 1, 2])
def test_completion_logprobs_are_filled(num_logprobs: int) -> None:
    api = answering("the cat")
    choice = api.complete(logprobs=num_logprobs).json()["choices"][0]
    logprobs = choice["logprobs"]
    ids = [*api.worker.answer_ids, api.worker.stop_token_id]
    assert logprobs["tokens"] == [api.tokenizer.token_text(token_id)[0] for token_id in ids]
    assert logprobs["token_logprobs"] == [-0.5] * len(ids)
    assert [len(top) for top in logprobs["top_logprobs"]] == [max(1, num_logprobs)] * len(ids)
    offsets = logprobs["text_offset"]
    placed = list(zip(logprobs["tokens"], offsets, strict=True))[:-1]
    assert all(choice["text"][offset:].startswith(token) for token, offset in placed)


def test_streamed_logprobs_add_up_to_the_whole_answers() -> None:
    api = answering(TEXT)
    whole = api.complete(logprobs=1).json()["choices"][0]["logprobs"]
    parts = [event["choices"][0]["logprobs"] for event in stream_events(api.complete(logprobs=1, stream=True))[:-1]]
    for key, value in whole.items():
        assert [item for part in parts for item in part[key]] == value


def test_chat_logprobs_name_tokens_with_their_bytes() -> None:
    api = answering("😀")
    content = api.chat(logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in content[:-1] for byte in entry["bytes"]) == "😀".encode()
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert api.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert api.chat().json()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("logprob", [float("-inf"), float("nan")])
@pytest.mark.parametrize("stream", [True, False])
def test_impossible_tokens_show_a_finite_logprob(logprob: float, stream: bool) -> None:
    api = answering("the", logprob=logprob)
    for response in (api.complete(logprobs=2, stream=stream), api.chat(logprobs=True, top_logprobs=2, stream=stream)):
        assert response.status_code == 200
        assert "-9999.0" in response.text
        assert "Infinity" not in response.text
        assert "NaN" not in response.text


def test_several_prompts_are_answered_side_by_side_in_order() -> None:
    api = answering("the dog", delay_s=0.01)
    body = api.complete(prompt=["the cat", [5, 6], "a"]).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert {choice["text"] for choice in body["choices"]} == {"the dog"}
    prompts = {request.request_id: request.prompt_token_ids for request in api.worker.requests}
    assert len(prompts) == 3
    assert body["usage"]["prompt_tokens"] == sum(map(len, prompts.values()))
    assert len(api.metrics.ttfts_s) == len(api.metrics.finished) == 3
    events = stream_events(api.complete(prompt=["the cat", "a"], stream=True))[:-1]
    for index in (0, 1):
        choices = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in choices) == "the dog"
        assert [choice["finish_reason"] for choice in choices].count("stop") == 1
    indices = [event["choices"][0]["index"] for event in events]
    assert indices != sorted(indices)


@pytest.mark.parametrize("prompt", ["the cat", [20, 21]])
def test_echo_puts_the_prompt_before_the_answer(prompt: Any) -> None:
    api = answering(" sat")
    text = prompt if isinstance(prompt, str) else api.tokenizer.decode(prompt)
    assert api.complete(prompt=prompt, echo=True).json()["choices"][0]["text"] == text + " sat"
    events = stream_events(api.complete(prompt=prompt, echo=True, stream=True, stop=[text[:3]]))
    assert events[0]["choices"][0]["text"].startswith(text)
    assert joined(events) == text + " sat"


def test_sampling_options_reach_the_engine() -> None:
    api = answering("the")
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 1, "min_p": 0.1, "seed": 7, "min_tokens": 2}
    penalties = {"presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.5}
    api.complete(**fields, **penalties, max_tokens=9, ignore_eos=True, stop_token_ids=[3], logit_bias={"5": -100})
    params = api.worker.requests[0].params
    for name, value in (fields | penalties | {"max_tokens": 9, "ignore_eos": True}).items():
        assert getattr(params, name) == value
    assert params.stop_token_ids == (3,)
    assert params.logit_bias == ((5, -100.0),)


def test_options_of_the_chat_template_reach_it() -> None:
    api = answering("the")
    assert api.chat(chat_template_kwargs={"think": True}).status_code == 200
    assert api.tokenizer.decode(api.worker.requests[0].prompt_token_ids).endswith("<think>")
    assert api.chat(chat_template_kwargs={"bos_token": 5, "unused": {"a": [None]}}).status_code == 200


def test_tokens_and_times_are_counted_once() -> None:
    for stream in (False, True):
        api = answering("the cat sat on the mat", delay_s=0.01)
        api.complete(stream=stream)
        num_tokens = len(api.worker.answer_ids) + 1
        assert api.metrics.num_tokens == num_tokens
        assert len(api.metrics.ttfts_s) == 1
        assert len(api.metrics.gaps_s) == num_tokens - 1
        assert all(gap_s >= 0.009 for gap_s in api.metrics.gaps_s[:-1])
        assert api.metrics.ttfts_s[0] >= 0.009
        assert api.metrics.finished == [("stop", len(api.worker.requests[0].prompt_token_ids))]


def test_an_answer_of_the_stop_token_alone_counts_a_first_token() -> None:
    api = answering("the")
    api.worker.answer_ids = []
    events = stream_events(api.chat(stream=True))
    assert joined(events) == ""
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert len(api.metrics.ttfts_s) == 1


def test_the_fake_worker_is_told_nothing_when_the_engine_ended_the_answer() -> None:
    api = answering("the")
    api.complete()
    assert (api.worker.finished, api.worker.aborted, api.worker.num_open) == ([], [], 0)
    assert isinstance(api.worker, FakeWorker)
