"""Functions, their choice and the form of the text in `/v1/responses`, and what they are in a chat."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WrapValidator

from deployments.protocol.errors import bad_request
from deployments.protocol.tools import Function, FunctionName, NamedChoice, NamedFunction, Tool, checked_choice
from worker.grammar.specs import json_object_grammar, json_schema_grammar
from worker.types import GrammarSpec


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class ResponseTool(_Part):
    """A function of the client's own; tools that the server would run are refused."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def tool(self) -> Tool:
        function = Function(name=self.name, description=self.description, parameters=self.parameters)
        return Tool(type="function", function=function)


class NamedResponseTool(_Part):
    type: Literal["function"]
    name: FunctionName


_Choice = Literal["none", "auto", "required"] | NamedResponseTool | None
ResponseToolChoice = Annotated[_Choice, WrapValidator(checked_choice, json_schema_input_type=_Choice)]


def chat_choice(choice: Any, *, has_tools: bool) -> Any:
    """What asks for no call at all is no matter where there are no tools."""
    if isinstance(choice, NamedResponseTool):
        return NamedChoice(type="function", function=NamedFunction(name=choice.name))
    return choice if has_tools or choice == "required" else None


class TextFormat(_Part):
    """`strict` changes nothing: a schema is always followed to the letter, as it is written."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")] | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None

    @property
    def grammar_field(self) -> str:
        """Where what the grammar is made of stands in the body."""
        return "text.format.schema" if self.type == "json_schema" else "text.format"

    def grammar(self) -> GrammarSpec | None:
        """None: any text will do. Raises ApiError that names the field."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return json_object_grammar()
        for field, value in (("text.format.name", self.name), ("text.format.schema", self.schema_)):
            if value is None:
                raise bad_request(f"{field}: needed where the type is 'json_schema'", field)
        assert self.schema_ is not None
        try:
            return json_schema_grammar(self.schema_)
        except RecursionError as error:
            raise bad_request("text.format.schema: nested too deeply", "text.format.schema") from error

    def to_dict(self) -> dict[str, Any]:
        """As it is told in responses."""
        if self.type != "json_schema":
            return {"type": self.type}
        shown = {"name": self.name, "description": self.description, "schema": self.schema_, "strict": self.strict}
        return {"type": self.type, **shown}


class TextOptions(_Part):
    format: TextFormat | None = None
    verbosity: str | None = None
