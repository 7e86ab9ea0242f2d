"""`/tokenize`, `/detokenize`, `/version`."""

from importlib.metadata import version
from typing import Any

import pytest

from tests.api_client import MAX_MODEL_LEN, MODEL, Api, answering

MESSAGES = [{"role": "user", "content": "the cat"}]


def test_a_prompt_becomes_the_ids_that_a_completion_is_given() -> None:
    for kind in ("byte_level", "sentencepiece_bpe"):
        api = answering("the", kind)
        answer = api.post("/tokenize", json={"model": MODEL, "prompt": "the cat 😀"}).json()
        api.complete(prompt="the cat 😀")
        assert answer["tokens"] == api.worker.requests[0].prompt_token_ids
        assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), MAX_MODEL_LEN)
        assert answer["token_strs"] is None


def test_messages_become_the_ids_that_a_chat_is_given() -> None:
    api = answering("the")
    answer = api.post("/tokenize", json={"messages": MESSAGES}).json()
    api.chat(messages=MESSAGES)
    assert answer["tokens"] == api.worker.requests[0].prompt_token_ids
    without = api.post("/tokenize", json={"messages": MESSAGES, "add_generation_prompt": False}).json()
    assert without["tokens"] == answer["tokens"][: without["count"]]
    assert without["count"] < answer["count"]


TOOLS = [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}]
#: shows everything that it is given
TEMPLATE = "{{ messages[0].content }}{% if tools %}{{ tools | tojson }}{% endif %}{{ tone }}{{ reasoning_effort }}"


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "none"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "clock"}}},
        {"chat_template_kwargs": {"tone": "<|im_start|>calm"}},
        {"reasoning_effort": "low", "chat_template_kwargs": {"tone": "calm"}, "tools": TOOLS},
    ],
)
@pytest.mark.parametrize("chat_template", [None, TEMPLATE])
def test_what_a_chat_has_beside_its_messages_counts(fields: dict[str, Any], chat_template: str | None) -> None:
    api = answering("the", settings={"max_model_len": 1024})
    api = Api(api.worker, settings={"max_model_len": 1024}, chat_template=chat_template)
    answer = api.post("/tokenize", json={"messages": MESSAGES, **fields}).json()
    assert api.chat(messages=MESSAGES, **fields).status_code == 200
    assert answer["tokens"] == api.worker.requests[0].prompt_token_ids
    bare = api.post("/tokenize", json={"messages": MESSAGES}).json()
    is_shown = (chat_template is not None or "tools" in fields) and fields.get("tool_choice") != "none"
    assert (answer["count"] > bare["count"]) is is_shown


def test_special_tokens_are_added_unless_not_wanted() -> None:
    api = answering("the", "sentencepiece_bpe")
    added = api.post("/tokenize", json={"prompt": "the"}).json()["tokens"]
    bare = api.post("/tokenize", json={"prompt": "the", "add_special_tokens": False}).json()["tokens"]
    assert added == [api.tokenizer.bos_token_id, *bare]


def test_tokens_are_shown_as_texts_when_asked() -> None:
    api = answering("the")
    answer = api.post("/tokenize", json={"prompt": "the cat", "return_token_strs": True}).json()
    assert "".join(answer["token_strs"]) == "the cat"
    assert len(answer["token_strs"]) == answer["count"]


def test_ids_become_text_again_control_tokens_included() -> None:
    api = answering("the")
    for text in ("the cat 😀", "<|im_start|>user", ""):
        tokens = api.post("/tokenize", json={"prompt": text}).json()["tokens"]
        assert api.post("/detokenize", json={"model": MODEL, "tokens": tokens}).json() == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "x"}, "chat_template"),
        ("/tokenize", {"messages": MESSAGES, "continue_final_message": True}, "continue_final_message"),
        ("/tokenize", {"messages": [{"role": "system", "content": "a"}] * 2}, "messages"),
        *(("/tokenize", {"messages": MESSAGES, "tools": value}, "tools") for value in (5, "", {}, [5], ["x"] * 129)),
        ("/tokenize", {"messages": MESSAGES, "tools": TOOLS * 2}, "tools"),
        ("/tokenize", {"messages": MESSAGES, "tool_choice": "required"}, "tool_choice"),
        ("/tokenize", {"messages": MESSAGES, "chat_template_kwargs": []}, "chat_template_kwargs"),
        ("/tokenize", {"messages": MESSAGES, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ("/tokenize", {"messages": MESSAGES, "reasoning_effort": 5}, "reasoning_effort"),
        ("/tokenize", {"messages": MESSAGES, "documents": [{}]}, "documents"),
        ("/tokenize", {"prompt": "a", "tools": TOOLS}, "tools"),
        ("/tokenize", {"prompt": "a", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens[0]"),
    ],
)
def test_what_is_wrong_is_named(path: str, body: dict[str, Any], param: str) -> None:
    response = answering("the").post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"].split("[")[0]) == (400, param.split("[")[0])


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})])
def test_the_model_may_be_left_out_but_not_be_another(path: str, body: dict[str, Any]) -> None:
    api = answering("the")
    assert api.post(path, json=body).status_code == 200
    assert api.post(path, json={**body, "model": "other"}).json()["error"]["code"] == "model_not_found"


def test_the_server_tells_its_version() -> None:
    assert answering("the").get("/version").json() == {"version": version("stallfree")}
