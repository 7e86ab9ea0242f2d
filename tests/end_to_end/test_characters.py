"""Characters of several tokens arrive whole, streamed and not. The model writes them because the prompt is a pattern
of them, or because it is allowed no other tokens."""

import asyncio

import httpx
import pytest

from tests.end_to_end.asking import all_streamed, completion
from tests.server_process import ServerProcess
from worker.demo_model import ensure_demo_model
from worker.text import Tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.model]

NUM_TOKENS = 24
PATTERNS = {
    "emoji": "😀🎉😀🎉😀🎉😀🎉😀",
    "one CJK word": "日本語、日本語、日本語、日本語、",
    "CJK words": "東京 大阪 東京 大阪 東京 大阪 東京",
}


def whole_text(server: ServerProcess, body: dict[str, object]) -> str:
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    return answer.json()["choices"][0]["text"]


@pytest.mark.parametrize("prompt", PATTERNS.values(), ids=PATTERNS.keys())
def test_a_pattern_of_wide_characters_goes_on_whole(server: ServerProcess, prompt: str):
    body = completion(prompt, NUM_TOKENS, ignore_eos=True)
    whole = whole_text(server, body)
    [stream] = asyncio.run(all_streamed(server.url, [body]))
    assert stream.text == whole
    # Several characters of the pattern itself, so that whole ones were there to break.
    assert sum(character in prompt for character in whole.replace(" ", "")) >= 4
    # The token limit may cut the last character; what is left of it is told at the very end, and nowhere else.
    assert "\ufffd" not in whole[:-1]
    assert not any("\ufffd" in delta for delta in stream.deltas[:-1])


@pytest.mark.parametrize("character", ["😀", "語", "ส"])
def test_a_character_that_is_forced_token_by_token_never_arrives_in_parts(server: ServerProcess, character: str):
    token_ids = Tokenizer(ensure_demo_model()).encode(character)
    assert len(token_ids) > 1
    bias = {str(token_id): 100 for token_id in token_ids}
    body = completion("A pattern: " + character * 6, 8 * len(token_ids), logit_bias=bias)
    [stream] = asyncio.run(all_streamed(server.url, [body]))
    assert stream.text == character * 8
    assert all(delta in ("", character) for delta in stream.deltas)
    assert whole_text(server, body) == stream.text


def test_an_echoed_prompt_of_wide_characters_comes_back_as_it_was(server: ServerProcess):
    prompt = "👩‍👩‍👧 東京 สวัสดี 😀"
    [stream] = asyncio.run(all_streamed(server.url, [completion(prompt, 1, echo=True)]))
    assert stream.text.startswith(prompt)
