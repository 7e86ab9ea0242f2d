"""The HTTP API's side of structured answers: what reaches the worker, what is refused by which name, and how soon."""

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.api_client import MODEL, Api, answering
from tests.structured.schemas import HOSTILE
from worker.grammar.checks import GrammarLimits
from worker.grammar.specs import (
    choice_grammar,
    ebnf_grammar,
    json_object_grammar,
    json_schema_grammar,
    regex_grammar,
)
from worker.types import GrammarSpec

SCHEMA = {"type": "object", "properties": {"größe": {"type": "integer"}}, "required": ["größe"]}
NAMED = {"type": "json_schema", "json_schema": {"name": "size", "strict": True, "schema": SCHEMA}}
TOO_DEEP = json.loads('{"items":' * 900 + "true" + "}" * 900)


def json_schema(**fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": fields}}


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    api = answering("the cat")
    api.app.state.service.grammars.limits = GrammarLimits(compile_s=1.0, wait_s=60.0)
    yield api
    api.app.state.service.grammars.close()


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": NAMED}, json_schema_grammar(SCHEMA)),
        ({"response_format": {"type": "json_object"}}, json_object_grammar()),
        ({"structured_outputs": {"json": SCHEMA}}, json_schema_grammar(SCHEMA)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, GrammarSpec("json_schema", json.dumps(SCHEMA))),
        ({"structured_outputs": {"regex": "[a-z]+", "json": None, "json_object": False}}, regex_grammar("[a-z]+")),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, choice_grammar(["yes", "no"])),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, ebnf_grammar('root ::= "a"')),
        ({"structured_outputs": {"json_object": True}}, json_object_grammar()),
        ({"guided_json": SCHEMA}, json_schema_grammar(SCHEMA)),
        ({"guided_regex": "a|b"}, regex_grammar("a|b")),
        ({"guided_choice": ["a"]}, choice_grammar(["a"])),
        ({"guided_grammar": 'start: "a"'}, ebnf_grammar('start: "a"')),
        ({"response_format": {"type": "text"}, "structured_outputs": {}, "guided_json": None}, None),
        ({"response_format": None, "structured_outputs": None}, None),
    ],
)
def test_each_way_to_ask_for_a_form_reaches_the_worker(
    api: Api, fields: dict[str, Any], grammar: GrammarSpec | None
) -> None:
    for response in (api.complete(**fields), api.chat(**fields)):
        assert response.status_code == 200, response.text
        assert api.worker.requests[-1].params.grammar == grammar


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (json_schema(schema={}), "response_format.json_schema.name"),
        (json_schema(name="a"), "response_format.json_schema.schema"),
        (json_schema(name="a", schema={"type": "thing"}), "response_format.json_schema.schema"),
        (json_schema(name="a", schema=TOO_DEEP), "response_format"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a"] * 1025}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        ({"response_format": NAMED, "guided_regex": "a"}, "guided_regex"),
        ({"guided_grammar": "start: missing"}, "guided_grammar"),
        ({"guided_regex": "a", "use_beam_search": True}, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "use_beam_search": True}, "response_format"),
    ],
)
def test_what_is_wrong_is_refused_by_its_name(api: Api, fields: dict[str, Any], param: str) -> None:
    num_requests = len(api.worker.requests)
    for response in (api.complete(**fields), api.chat(**fields, stream=True)):
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"].startswith(param)
        assert error["message"].startswith(error["param"])
    assert len(api.worker.requests) == num_requests


def test_hostile_grammars_are_refused_in_time_and_the_event_loop_goes_on() -> None:
    api = answering("the cat")
    fields = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}
    hostile = [
        {"structured_outputs": {fields[HOSTILE[name][0]]: HOSTILE[name][1]}}
        for name in (
            "30 patterns at once",
            "nested 200 deep",
            "nested 100,000 deep",
            "enum of 200,000",
            "groups 50,000 deep",
            "a rule that is itself",
            "1,500 references",
        )
    ]

    async def work(client: httpx.AsyncClient) -> tuple[list[tuple[int, float]], float]:
        gaps_s, is_over = [0.0], asyncio.Event()

        async def tick() -> None:
            while not is_over.is_set():
                began_s = time.monotonic()
                await asyncio.sleep(0.01)
                gaps_s.append(time.monotonic() - began_s)

        async def ask(asked: dict[str, Any]) -> tuple[int, float]:
            began_s = time.monotonic()
            response = await client.post("/v1/completions", json={"model": MODEL, "prompt": "a", **asked}, timeout=60)
            return response.status_code, time.monotonic() - began_s

        await client.post("/v1/completions", json={"model": MODEL, "prompt": "a", "guided_regex": "a"}, timeout=60)
        ticker = asyncio.create_task(tick())
        results = [await ask(asked) for asked in hostile]
        is_over.set()
        await ticker
        return results, max(gaps_s)

    results, longest_gap_s = api.run(work)
    api.app.state.service.grammars.close()
    assert [status for status, _ in results] == [400] * len(hostile)
    assert max(took_s for _, took_s in results) < 5.0
    assert longest_gap_s < 1.0, "somebody held the event loop"


def test_a_grammar_that_nobody_could_look_at_in_time_is_503_with_its_field() -> None:
    api = answering("the cat")
    grammars = api.app.state.service.grammars
    grammars.limits = GrammarLimits(wait_s=-1.0)
    response = api.complete(guided_regex="a")
    grammars.close()
    assert response.status_code == 503
    assert response.json()["error"]["param"] == "guided_regex"
    assert response.headers["retry-after"] == "1"
