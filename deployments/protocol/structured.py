"""What a request asks of the form of its answer: `response_format`, `structured_outputs`, the older `guided_*` fields.

Owns their shapes and how they become a grammar. Whether the grammar is any good is found out elsewhere.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr

from deployments.protocol.errors import bad_request, not_supported
from worker.grammar.specs import (
    choice_grammar,
    ebnf_grammar,
    json_object_grammar,
    json_schema_grammar,
    regex_grammar,
)
from worker.types import GrammarSpec

MAX_CHOICES = 1024

#: a schema as an object, or as the text of one
Schema = dict[str, Any] | str
Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class JsonSchemaFormat(_Part):
    """`strict` changes nothing: a schema is always followed to the letter, as it is written."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    strict: bool | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class ResponseFormat(_Part):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


def _without_neutral(value: Any) -> Any:
    """Clients send every key that they know, most of them null or false."""
    if not isinstance(value, dict):
        return value
    return {key: item for key, item in value.items() if item is not None and item is not False}


class StructuredOutputs(_Part):
    """One of these."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    json_: Annotated[Schema | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None


def _none_if_empty(value: Any) -> Any:
    """Clients send an empty object for no format at all."""
    return None if value == {} else value


class AnswerForm(_Part):
    """The fields of a request that are looked at here."""

    response_format: Annotated[ResponseFormat | None, BeforeValidator(_none_if_empty)] = None
    structured_outputs: Annotated[StructuredOutputs | None, BeforeValidator(_without_neutral)] = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    _grammar: tuple[GrammarSpec, str] | None = PrivateAttr(default=None)

    @property
    def grammar(self) -> tuple[GrammarSpec, str] | None:
        """What the answer is held to, and the field that asks for it; None: any text will do."""
        return self._grammar

    def hold_to(self, grammar: GrammarSpec, field: str) -> None:
        """For dialects that ask for the form under another name, which errors are to tell."""
        self._grammar = (grammar, field)

    def find_grammar(self, *, use_beam_search: bool) -> None:
        """Sets `grammar`. Raises ApiError where the fields do not agree."""
        try:
            found = {field: grammar for field, grammar in _grammars(self).items() if grammar is not None}
        except RecursionError as error:
            raise bad_request("the schema of the answer is nested too deeply") from error
        if not found:
            return
        first, *others = found
        if others:
            raise bad_request(f"{others[0]}: not together with {first}: an answer has one form", others[0])
        if use_beam_search:
            raise not_supported(first, "together with use_beam_search it")
        self._grammar = (found[first], first)


def _grammars(request: AnswerForm) -> Mapping[str, GrammarSpec | None]:
    """By the field that asks for it."""
    grammars: dict[str, GrammarSpec | None] = {"response_format": None}
    response_format = request.response_format
    if response_format is not None and response_format.type == "json_object":
        grammars["response_format"] = json_object_grammar()
    elif response_format is not None and response_format.type == "json_schema":
        if response_format.json_schema is None:
            field = "response_format.json_schema"
            raise bad_request(f"{field}: needed where the type is 'json_schema'", field)
        grammars["response_format.json_schema.schema"] = json_schema_grammar(response_format.json_schema.schema_)
    asked = request.structured_outputs
    if asked is not None:
        grammars["structured_outputs.json"] = _schema(asked.json_)
        grammars["structured_outputs.regex"] = _regex(asked.regex)
        grammars["structured_outputs.choice"] = _choice(asked.choice)
        grammars["structured_outputs.grammar"] = _ebnf(asked.grammar)
        grammars["structured_outputs.json_object"] = json_object_grammar() if asked.json_object else None
    grammars["guided_json"] = _schema(request.guided_json)
    grammars["guided_regex"] = _regex(request.guided_regex)
    grammars["guided_choice"] = _choice(request.guided_choice)
    grammars["guided_grammar"] = _ebnf(request.guided_grammar)
    return grammars


def _schema(schema: Schema | None) -> GrammarSpec | None:
    if isinstance(schema, str):
        return GrammarSpec("json_schema", schema)
    return None if schema is None else json_schema_grammar(schema)


def _regex(regex: str | None) -> GrammarSpec | None:
    return None if regex is None else regex_grammar(regex)


def _choice(choices: list[str] | None) -> GrammarSpec | None:
    return None if choices is None else choice_grammar(choices)


def _ebnf(text: str | None) -> GrammarSpec | None:
    return None if text is None else ebnf_grammar(text)
