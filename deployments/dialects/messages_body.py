"""The bodies of Anthropic's `/v1/messages` and `/v1/messages/count_tokens`, and the chat that they mean."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from deployments.protocol.errors import bad_request
from deployments.protocol.fields import MAX_STOP_STRING_CHARS, MAX_STOP_STRINGS
from deployments.protocol.messages import MAX_MESSAGES, Message, TextPart
from deployments.protocol.parsing import Refusals, parse_body
from deployments.protocol.requests import ChatRequest

_REFUSED: Refusals = {
    "tools": ((None, []), "calling tools"),
    "tool_choice": ((None, {"type": "none"}, {"type": "auto"}), "calling tools"),
    "thinking": ((None, {"type": "disabled"}), "thinking"),
    "mcp_servers": ((None, []), "MCP"),
    "container": ((None,), "a container"),
    "output_config": ((None, {}), "a format of the output"),
    "output_format": ((None,), "a format of the output"),
}


def _text_of(value: Any) -> Any:
    """A list of text blocks means their texts joined."""
    if not isinstance(value, list):
        return value
    texts: list[str] = []
    for block in value:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind != "text":
            raise ValueError("every block must be an object of type 'text'")
        if not isinstance(block.get("text"), str):
            raise ValueError("a block of type 'text' needs the string 'text'")
        texts.append(block["text"])
    return "".join(texts)


def _stop_sequences(value: Any) -> Any:
    if isinstance(value, list) and any(string == "" for string in value):
        raise ValueError("a stop sequence must not be empty")
    return value


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class MessagesMessage(_Body):
    role: Literal["user", "assistant"]
    content: Annotated[str, BeforeValidator(_text_of, json_schema_input_type=str | list[TextPart])]


class Metadata(_Body):
    user_id: str | None = None


class CountTokensRequest(_Body):
    """What the prompt of a message is made of."""

    model: str
    messages: Annotated[list[MessagesMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Annotated[str | None, BeforeValidator(_text_of, json_schema_input_type=str | list[TextPart] | None)] = None
    metadata: Metadata | None = None
    cache_control: dict[str, Any] | None = None

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Raises ApiError that names the field."""
        request = parse_body(cls, body, _REFUSED)
        if request.messages[-1].role == "assistant":
            raise bad_request("messages: the last one must be the user's; an answer cannot be begun for the model")
        return request

    @property
    def chat_messages(self) -> list[Message]:
        system = [Message(role="system", content=self.system)] if self.system else []
        return system + [Message(role=message.role, content=message.content) for message in self.messages]


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

    @property
    def chat(self) -> ChatRequest:
        """The same as a chat. All its values were checked here, under the names that the client knows."""
        return ChatRequest(
            model=self.model,
            messages=self.chat_messages,
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stream=self.stream,
        )
