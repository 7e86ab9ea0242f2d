"""The parts of chat requests that are about tools, and what of them must fit together."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from deployments.protocol.errors import bad_request, not_supported

if TYPE_CHECKING:
    from deployments.protocol.requests import ChatRequest

MAX_TOOLS = 128
MAX_CALLS = 256
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class Function(_Part):
    """`strict` changes nothing: a call that is forced follows the schema to the letter. Without `parameters` the
    function takes none."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Part):
    type: Literal["function"]
    function: Function


class NamedFunction(_Part):
    name: FunctionName


class NamedChoice(_Part):
    type: Literal["function"]
    function: NamedFunction


class FunctionCall(_Part):
    """`arguments` is JSON text."""

    name: FunctionName
    arguments: str


class ToolCall(_Part):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


def _none_if_empty(value: Any) -> Any:
    """Clients send an empty list for no tools at all."""
    return None if value == [] else value


def checked_choice(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Of chats and of responses: what it may be, told in one line."""
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        raise not_supported("tool_choice", "the form 'allowed_tools'")
    try:
        return validate(value)
    except ValidationError:
        raise ValueError("must be 'none', 'auto', 'required', or an object that names a function") from None


Tools = Annotated[
    Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None,
    BeforeValidator(_none_if_empty, json_schema_input_type=Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None),
]
ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedChoice | None,
    WrapValidator(checked_choice, json_schema_input_type=Literal["none", "auto", "required"] | NamedChoice | None),
]
ToolCalls = Annotated[list[ToolCall], Field(max_length=MAX_CALLS)]


def check_tools(request: "ChatRequest") -> None:
    """Raises ApiError where tools, the choice and the form of the answer do not fit together."""
    choice = request.tool_choice
    functions = [tool.function for tool in request.tools or []]
    names = {function.name for function in functions}
    if len(names) < len(functions):
        raise bad_request("tools: two functions have the same name", "tools")
    if not functions:
        if choice == "required" or isinstance(choice, NamedChoice):
            raise bad_request("tool_choice: needs tools to choose from", "tool_choice")
        return
    if isinstance(choice, NamedChoice) and choice.function.name not in names:
        raise bad_request("tool_choice: names a function that is not among the tools", "tool_choice")
    if not request.forced_functions:
        return
    if request.grammar is not None:
        raise bad_request(f"tool_choice: a call cannot be forced together with {request.grammar[1]}", "tool_choice")
    if request.use_beam_search:
        raise not_supported("tool_choice", "forcing a call together with use_beam_search")
