"""Conversations with tools, as chat templates take them; and as text, for templates that know no tools."""

import json
from collections.abc import Sequence
from typing import Any

from deployments.protocol.messages import Message
from deployments.protocol.nesting import json_in_text
from deployments.protocol.tools import Function
from deployments.tool_calls.pieces import ToolCallFormat


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Templates write the arguments of calls as JSON themselves."""
    plain = [message.model_dump(exclude_none=True) for message in messages]
    for message in plain:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = _parsed(call["function"]["arguments"])
    return plain


def template_tools(functions: Sequence[Function]) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": function.model_dump(exclude_none=True, exclude={"strict"})}
        for function in functions
    ]


def told_messages(
    messages: Sequence[Message], functions: Sequence[Function], call_format: ToolCallFormat
) -> list[dict[str, Any]]:
    """The same for a template that knows no tools: they are told in the system message, and calls and their results
    are text of the messages."""
    told = [_told(message, call_format) for message in messages]
    if functions:
        text = _introduction(functions, call_format)
        if told and told[0]["role"] == "system":
            told[0]["content"] = f"{told[0]['content']}\n\n{text}"
        else:
            told.insert(0, {"role": "system", "content": text})
    return told


def _told(message: Message, call_format: ToolCallFormat) -> dict[str, Any]:
    calls = [call_format.written(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    role = "user" if message.role in ("tool", "function") else message.role
    text = message.content
    if message.role in ("tool", "function"):
        text = f"<tool_response>\n{text}\n</tool_response>"
    return {"role": role, "content": "\n".join([text, *calls] if text else calls)}


def _introduction(functions: Sequence[Function], call_format: ToolCallFormat) -> str:
    tools = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in template_tools(functions))
    example = call_format.written("NAME", "{}")
    return f"You may call these functions:\n{tools}\n\nTo call one, answer with its name and its arguments:\n{example}"


def _parsed(arguments: str) -> Any:
    """An object where it is JSON, the text itself where a model had written something else."""
    try:
        value = json_in_text(arguments or "{}")
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments
