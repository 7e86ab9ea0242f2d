"""Twenty schemas on the demo model: every answer that its limit did not cut parses and validates, preempted or not."""

import json
from collections.abc import Iterator

import jsonschema
import pytest
import torch

from tests.structured.schemas import SCHEMAS
from worker.config import EngineConfig
from worker.demo_model import ensure_demo_model
from worker.engine import Engine
from worker.grammar.specs import TaggedJson, json_schema_grammar, tagged_json_grammar
from worker.text import Tokenizer
from worker.types import EngineRequest, SamplingParams, TokenEvent

pytestmark = [pytest.mark.slow, pytest.mark.model]

MAX_TOKENS = 120
#: of the answers; those of a small model may run on inside a text that may be long
LEAST_WHOLE_SHARE = 0.8


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(ensure_demo_model())


@pytest.fixture(scope="module", params=[600, 50], ids=["ample", "tiny pool"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    num_threads = torch.get_num_threads()
    config = EngineConfig(
        max_model_len=320,
        max_num_batched_tokens=128,
        num_device_blocks=request.param,
        num_host_blocks=20,
        num_threads=1,
    )
    engine = Engine(config)
    yield engine
    engine.close()
    torch.set_num_threads(num_threads)


def answers_of(engine: Engine, requests: list[EngineRequest]) -> dict[tuple[str, int], tuple[list[int], str]]:
    """Tokens and finish reason by request and sample."""
    for request in requests:
        engine.add_request(request, 0.0)
    tokens: dict[tuple[str, int], list[int]] = {}
    ended: dict[tuple[str, int], tuple[list[int], str]] = {}
    now = 0.0
    while engine.has_unfinished():
        event: TokenEvent
        for event in engine.step(now):
            key = (event.request_id, event.index)
            tokens.setdefault(key, []).extend(event.token_ids)
            if event.finish_reason is not None:
                assert event.error is None, event.error
                ended[key] = tokens[key], event.finish_reason
        now += 1.0
    engine.check_integrity()
    return ended


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_whole_answer_parses_and_validates(engine: Engine, tokenizer: Tokenizer, temperature: float) -> None:
    requests = [
        EngineRequest(
            name,
            tokenizer.encode_chat([{"role": "user", "content": question}]),
            SamplingParams(MAX_TOKENS, n=2, temperature=temperature, seed=3, grammar=json_schema_grammar(schema)),
        )
        for name, (schema, question) in SCHEMAS.items()
    ]
    answers = answers_of(engine, requests)
    assert len(answers) == 2 * len(SCHEMAS)
    num_whole = 0
    for (name, _), (token_ids, reason) in answers.items():
        assert reason in ("stop", "length")
        if reason == "stop":
            jsonschema.validate(json.loads(tokenizer.decode(token_ids[:-1])), SCHEMAS[name][0])
            num_whole += 1
    print(f"{num_whole} of {len(answers)} answers are whole; {engine.totals}")
    assert num_whole >= LEAST_WHOLE_SHARE * len(answers)
    if engine.num_device_blocks < 100:
        assert engine.totals.num_preemptions_recompute + engine.totals.num_preemptions_swap > 0


def test_a_forced_call_has_the_named_tool_and_valid_arguments(engine: Engine, tokenizer: Tokenizer) -> None:
    arguments = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer", "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    call = TaggedJson(arguments, '<tool_call>\n{"name": "get_weather", "arguments": ', "}\n</tool_call>")
    prompt = tokenizer.encode_chat([{"role": "user", "content": "Will it rain in Lisbon this week?"}])
    params = SamplingParams(MAX_TOKENS, n=3, temperature=1.0, seed=1, grammar=tagged_json_grammar([call]))
    for token_ids, reason in answers_of(engine, [EngineRequest("call", prompt, params)]).values():
        assert reason == "stop"
        text = tokenizer.decode(token_ids[:-1])
        parsed = json.loads(text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
        assert parsed["name"] == "get_weather"
        jsonschema.validate(parsed["arguments"], arguments)
