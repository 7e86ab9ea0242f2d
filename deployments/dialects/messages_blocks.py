"""The content blocks of Anthropic's messages, and the messages of a chat that they mean."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Tag

from deployments.protocol.messages import Message, TextPart
from deployments.protocol.tools import FunctionCall, FunctionName, ToolCall

_KINDS = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")


def text_of(value: Any) -> Any:
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


class _Block(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class TextInput(_Block):
    type: Literal["text"]
    text: str


class ToolUse(_Block):
    type: Literal["tool_use"]
    id: str
    name: FunctionName
    input: dict[str, Any]


class ToolResult(_Block):
    """What a call gave. An error says so in its text: chats have no other place for it."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[
        str | None, BeforeValidator(text_of, json_schema_input_type=str | list[TextPart] | None)
    ] = None
    is_error: bool | None = None

    @property
    def message(self) -> Message:
        text = self.content or ""
        return Message(role="tool", tool_call_id=self.tool_use_id, content=f"Error: {text}" if self.is_error else text)


class Thinking(_Block):
    """Earlier reasoning, which is no part of a prompt."""

    type: Literal["thinking", "redacted_thinking"]


def _kind(block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return "thinking" if kind == "redacted_thinking" else str(kind)


def _blocks(value: Any) -> Any:
    """A string is a block of text."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of blocks")
    if any(not isinstance(block, dict) or block.get("type") not in _KINDS for block in value):
        raise ValueError("every block must be an object of type 'text', 'tool_use' or 'tool_result'")
    return value


InputBlock = Annotated[
    Annotated[TextInput, Tag("text")]
    | Annotated[ToolUse, Tag("tool_use")]
    | Annotated[ToolResult, Tag("tool_result")]
    | Annotated[Thinking, Tag("thinking")],
    Discriminator(_kind),
]
Content = Annotated[list[InputBlock], BeforeValidator(_blocks, json_schema_input_type=str | list[InputBlock])]


def user_messages(content: list[Any]) -> list[Message]:
    """What a user says, and the results of calls, in their order. Text between two results is one message."""
    messages: list[Message] = []
    texts: list[str] = []
    for block in content:
        if isinstance(block, TextInput):
            texts.append(block.text)
        elif isinstance(block, ToolResult):
            messages += _said(texts)
            texts = []
            messages.append(block.message)
    return messages + (_said(texts or [""]) if texts or not messages else [])


def _said(texts: list[str]) -> list[Message]:
    return [Message(role="user", content="".join(texts))] if texts else []


def assistant_message(content: list[Any]) -> Message:
    calls = [
        ToolCall(
            id=block.id,
            function=FunctionCall(name=block.name, arguments=json.dumps(block.input, ensure_ascii=False)),
        )
        for block in content
        if isinstance(block, ToolUse)
    ]
    text = "".join(block.text for block in content if isinstance(block, TextInput))
    return Message(role="assistant", content=text, tool_calls=calls or None)
