"""The input items of `/v1/responses` and the messages of a chat that they mean: messages, calls, results of calls."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Tag

from deployments.protocol.messages import Message
from deployments.protocol.tools import FunctionCall, FunctionName, ToolCall

_KINDS = ("message", "function_call", "function_call_output")
_TEXT_PARTS = ("input_text", "output_text", "text")
_SYSTEM_ROLES = ("system", "developer")


def _text_of(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    texts: list[str] = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _TEXT_PARTS:
            raise ValueError("every part must be an object of type 'input_text' or 'output_text'")
        if not isinstance(part.get("text"), str):
            raise ValueError(f"a part of type '{kind}' needs the string 'text'")
        texts.append(part["text"])
    return "".join(texts)


def items_of(value: Any) -> Any:
    """A string is a message of the user. Reasoning is no part of a prompt: items of it are left out."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of items")
    items = []
    for index, item in enumerate(value):
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "reasoning":
            continue
        if kind not in _KINDS:
            raise ValueError(f"item {index} must be an object of type {', '.join(map(repr, _KINDS))}")
        items.append(item)
    return items


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class InputTextPart(_Part):
    type: Literal["input_text", "output_text", "text"]
    text: str


Text = Annotated[str, BeforeValidator(_text_of, json_schema_input_type=str | list[InputTextPart])]


class InputMessage(_Part):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text


class InputCall(_Part):
    """`arguments` is JSON text."""

    type: Literal["function_call"]
    call_id: str
    name: FunctionName
    arguments: str


class InputCallOutput(_Part):
    type: Literal["function_call_output"]
    call_id: str
    output: Text


def _kind(item: Any) -> str:
    return str(item.get("type", "message") if isinstance(item, dict) else item.type)


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputCallOutput, Tag("function_call_output")],
    Discriminator(_kind),
]


def chat_messages(instructions: str | None, items: Sequence[Any]) -> list[Message]:
    """Instructions and what systems or developers say first are one message: most templates take only one. Calls that
    follow each other, or the assistant's words, are one message with them."""
    rest = list(items)
    leading = [instructions] if instructions else []
    while rest and isinstance(rest[0], InputMessage) and rest[0].role in _SYSTEM_ROLES:
        leading.append(rest.pop(0).content)
    messages = [Message(role="system", content="\n\n".join(leading))] if leading else []
    for item in rest:
        if isinstance(item, InputCall):
            call = ToolCall(id=item.call_id, function=FunctionCall(name=item.name, arguments=item.arguments))
            before = messages.pop() if messages and messages[-1].role == "assistant" else None
            content = "" if before is None else before.content
            calls = [] if before is None else before.tool_calls or []
            messages.append(Message(role="assistant", content=content, tool_calls=[*calls, call]))
        elif isinstance(item, InputCallOutput):
            messages.append(Message(role="tool", content=item.output, tool_call_id=item.call_id))
        else:
            messages.append(_message(item))
    return messages


def _message(item: InputMessage) -> Message:
    return Message(role="system" if item.role == "developer" else item.role, content=item.content)
