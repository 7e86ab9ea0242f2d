"""The bodies of Anthropic's `/v1/messages` and `/v1/messages/count_tokens`, and the chat that they mean."""

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from deployments.dialects.messages_blocks import Content, ToolResult, ToolUse, assistant_message, text_of, user_messages
from deployments.protocol.errors import bad_request
from deployments.protocol.fields import MAX_STOP_STRING_CHARS, MAX_STOP_STRINGS, Timeout
from deployments.protocol.messages import MAX_MESSAGES, Message, TextPart
from deployments.protocol.parsing import Refusals, parse_body
from deployments.protocol.requests import ChatRequest
from deployments.protocol.tools import MAX_TOOLS, Function, FunctionName, NamedChoice, NamedFunction, Tool

_REFUSED: Refusals = {
    "thinking": ((None, {"type": "disabled"}), "thinking"),
    "mcp_servers": ((None, []), "MCP"),
    "container": ((None,), "a container"),
    "output_config": ((None, {}), "a format of the output"),
    "output_format": ((None,), "a format of the output"),
}


def _stop_sequences(value: Any) -> Any:
    if isinstance(value, list) and any(string == "" for string in value):
        raise ValueError("a stop sequence must not be empty")
    return value


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class MessagesMessage(_Body):
    role: Literal["user", "assistant"]
    content: Content

    @property
    def chat_messages(self) -> list[Message]:
        return user_messages(self.content) if self.role == "user" else [assistant_message(self.content)]


class MessagesTool(_Body):
    """A function of the client's own; tools that the server would run are refused."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]

    @property
    def tool(self) -> Tool:
        function = Function(name=self.name, description=self.description, parameters=self.input_schema)
        return Tool(type="function", function=function)


class MessagesToolChoice(_Body):
    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None

    @property
    def choice(self) -> Literal["auto", "required", "none"] | NamedChoice:
        if self.type == "tool":
            return NamedChoice(type="function", function=NamedFunction(name=self.name or ""))
        return "required" if self.type == "any" else self.type


class Metadata(_Body):
    user_id: str | None = None


class CountTokensRequest(_Body):
    """What the prompt of a message is made of."""

    model: str
    messages: Annotated[list[MessagesMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Annotated[str | None, BeforeValidator(text_of, json_schema_input_type=str | list[TextPart] | None)] = None
    tools: Annotated[list[MessagesTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessagesToolChoice | None = None
    metadata: Metadata | None = None
    cache_control: dict[str, Any] | None = None

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Raises ApiError that names the field."""
        request = parse_body(cls, body, _REFUSED)
        if request.messages[-1].role == "assistant":
            raise bad_request("messages: the last one must be the user's; an answer cannot be begun for the model")
        for place, message in enumerate(request.messages):
            _check_blocks(place, message)
        if request.tool_choice is not None and request.tool_choice.type == "tool" and request.tool_choice.name is None:
            raise bad_request("tool_choice.name: needed where the type is 'tool'", "tool_choice.name")
        request.chat.check()
        return request

    @cached_property
    def chat(self) -> ChatRequest:
        """The same as a chat. All its values were checked here, under the names that the client knows."""
        return ChatRequest(**self._chat_fields())

    def _chat_fields(self) -> dict[str, Any]:
        system = [Message(role="system", content=self.system)] if self.system else []
        asked = self.tool_choice
        # What asks for no call at all is no matter where there are no tools.
        choice = None if asked is None or (not self.tools and asked.type in ("auto", "none")) else asked.choice
        return {
            "model": self.model,
            "messages": [*system, *(chat for message in self.messages for chat in message.chat_messages)],
            "tools": [tool.tool for tool in self.tools or []] or None,
            "tool_choice": choice,
            "parallel_tool_calls": False if asked is not None and asked.disable_parallel_tool_use else None,
        }


class MessagesRequest(CountTokensRequest):
    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[
        list[Annotated[str, Field(max_length=MAX_STOP_STRING_CHARS)]] | None,
        Field(max_length=MAX_STOP_STRINGS),
        BeforeValidator(_stop_sequences),
    ] = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    stream: bool | None = None
    service_tier: str | None = None
    timeout: Timeout = None
    explain: bool | None = None

    def _chat_fields(self) -> dict[str, Any]:
        return {
            **super()._chat_fields(),
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stream": self.stream,
            "timeout": self.timeout,
        }


def _check_blocks(place: int, message: MessagesMessage) -> None:
    """Calls are the assistant's, their results the user's."""
    wrong, kind = (ToolUse, "tool_use") if message.role == "user" else (ToolResult, "tool_result")
    for number, block in enumerate(message.content):
        if isinstance(block, wrong):
            field = f"messages[{place}].content[{number}]"
            raise bad_request(f"{field}: a message of the role '{message.role}' has no '{kind}'", field)
