"""Requests generated from descriptions, OpenAI's and our own: no server errors, answers as described, and the server
lives on.
"""

import asyncio
import copy
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.api_client import BASE_URL, MODEL, Api, answering

pytestmark = pytest.mark.slow

OPENAI = Path(__file__).parents[2] / "shared" / "data" / "openai" / "openai-serving-subset.json"
NUM_EXAMPLES = 200
#: descriptions of what is sent
BODIES = re.compile("Request|Properties$|^(Message|MessagesMessage|InputMessage)$")
CAPPED = {"max_tokens": 8, "max_completion_tokens": 8, "max_output_tokens": 8, "n": 2, "best_of": 2, "beam_width": 2}


TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 300}, "minItems": 1}
TEXT = {"type": "string", "minLength": 1}
#: Fields that contradict each other when they are drawn at random, and ids that no vocabulary has, are left out of
#: half of the requests, which are then answered.
PLAIN: dict[str, Any] = {
    **{
        name: {"type": "null"}
        for name in (
            *("use_beam_search", "beam_width", "length_penalty", "early_stopping", "best_of"),
            *("stream_options", "logit_bias", "stop_token_ids", "top_logprobs", "min_tokens", "timeout"),
            *("prompt_logprobs", "chat_template_kwargs", "add_special_tokens", "metadata"),
            *("tools", "tool_choice", "functions", "function_call", "reasoning_effort", "documents"),
        )
    },
    "prompt": {"anyOf": [TEXT, TOKEN_IDS]},
    "tokens": TOKEN_IDS,
    "content": TEXT,
    "role": {"const": "user"},
}


def pinned(document: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """The description with our model in every body, numbers that cost no time, and `plain` fields."""
    document = copy.deepcopy(document)
    for name, schema in document["components"]["schemas"].items():
        if BODIES.search(name):
            _pin(schema, plain)
    return document


def _pin(value: Any, plain: dict[str, Any]) -> None:
    if isinstance(value, list):
        for item in value:
            _pin(item, plain)
    if not isinstance(value, dict):
        return
    for item in value.values():
        _pin(item, plain)
    properties = value.get("properties")
    if isinstance(properties, dict):
        if properties.keys() & {"messages", "prompt", "input", "tokens"}:
            properties["model"] = {"const": MODEL}
        for name in properties.keys() & CAPPED.keys():
            properties[name] = {"type": "integer", "minimum": 1, "maximum": CAPPED[name]}
        for name in properties.keys() & plain.keys():
            properties[name] = plain[name]
        if plain and properties.keys() >= {"prompt", "messages"}:
            # One of the two must be given.
            properties["prompt"], properties["messages"] = TEXT, {"type": "null"}
            value["required"] = ["prompt"]


def generated(
    document: dict[str, Any],
    ask: Callable[[Case], None],
    num_examples: int,
    plain: dict[str, Any] | None = None,
    mode: GenerationMode = GenerationMode.POSITIVE,
) -> None:
    schema = schemathesis.openapi.from_dict(pinned(document, plain or {}))

    @settings(
        max_examples=num_examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=schema.as_strategy(generation_mode=mode))
    def test(case: Case) -> None:
        ask(case)

    test()


#: what a `timeout` of microseconds and a grammar that a busy machine could not look at in time are told
NO_TIME = (503, 504)


class Asked:
    """Sends cases to an API in this process and checks what comes back. `prefix` comes before the paths."""

    def __init__(self, api: Api, prefix: str = "") -> None:
        self.statuses: Counter[tuple[str, int]] = Counter()
        self._api = api
        self._prefix = prefix

    def __call__(self, case: Case) -> None:
        arguments = case.as_transport_kwargs(base_url=BASE_URL + self._prefix)
        response = self._api.request(
            arguments["method"],
            arguments["url"],
            params=arguments.get("params"),
            headers=dict(arguments["headers"]),
            content=_content(arguments),
        )
        self.statuses[case.path, response.status_code] += 1
        assert response.status_code < 500 or response.status_code in NO_TIME, response.text
        if response.headers["content-type"].startswith("text/event-stream"):
            assert _is_event_stream(response.text)
            return
        if response.status_code == 200:
            self.check(case, response)
        elif case.path != "/metrics":
            assert response.json()["error"]["message"]

    def check(self, case: Case, response: httpx.Response) -> None:
        case.validate_response(response, checks=[response_schema_conformance])


class AskedAsDescribed(Asked):
    """Our own description also names every status and type."""

    def check(self, case: Case, response: httpx.Response) -> None:
        checks = [response_schema_conformance, status_code_conformance, content_type_conformance]
        case.validate_response(response, checks=checks)


def _content(arguments: dict[str, Any]) -> bytes | None:
    if arguments.get("json") is not None:
        return json.dumps(arguments["json"]).encode()
    data: bytes | None = arguments.get("data")
    return data


def _is_event_stream(text: str) -> bool:
    blocks = text.split("\n\n")
    return blocks.pop() == "" and all(
        line.startswith(("data: ", "event: ")) for block in blocks for line in block.split("\n")
    )


def lives(api: Api) -> bool:
    return api.complete().status_code == 200 and asyncio.run(_all_is_over(api))


async def _all_is_over(api: Api) -> bool:
    return api.worker.num_open == 0


def test_openais_own_description() -> None:
    if not OPENAI.exists():
        pytest.skip(f"OpenAI's description is not at {OPENAI}")
    api = answering("the cat sat", settings={"max_model_len": 4096})
    asked = Asked(api, "/v1")
    document = json.loads(OPENAI.read_text())
    generated(document, asked, NUM_EXAMPLES)
    generated(document, asked, NUM_EXAMPLES // 4, PLAIN)
    generated(document, asked, NUM_EXAMPLES // 4, mode=GenerationMode.NEGATIVE)
    assert lives(api)
    for path in ("/completions", "/chat/completions", "/models"):
        assert asked.statuses[path, 200] > 0, asked.statuses


def test_our_own_description() -> None:
    api = answering("the cat sat", settings={"max_model_len": 4096})
    asked = AskedAsDescribed(api)
    document = api.get("/openapi.json").json()
    generated(document, asked, NUM_EXAMPLES)
    generated(document, asked, NUM_EXAMPLES, PLAIN)
    generated(document, asked, NUM_EXAMPLES // 4, mode=GenerationMode.NEGATIVE)
    assert lives(api)
    for path in document["paths"]:
        if "{" not in path:  # nobody guesses the id of a model or of a request
            assert asked.statuses[path, 200] > 0, asked.statuses
