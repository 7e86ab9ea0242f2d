"""The messages of a chat, as all dialects mean them: a role, text, and what there is of calls and reasoning."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from deployments.protocol.tools import ToolCalls

MAX_MESSAGES = 4096

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


def _content(value: Any, info: ValidationInfo) -> Any:
    """A list of text parts means the parts joined. OpenAI lets an assistant's message have no text, as null."""
    if value is None and info.data.get("role") == "assistant":
        return ""
    if not isinstance(value, list):
        return value
    texts: list[str] = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise ValueError("every part must be an object of type 'text'")
        if not isinstance(part.get("text"), str):
            raise ValueError("a part of type 'text' needs the string 'text'")
        texts.append(part["text"])
    return "".join(texts)


def _tool_call_id(value: Any, info: ValidationInfo) -> Any:
    """Whose call it is that a tool answers."""
    if value is None and info.data.get("role") == "tool":
        raise PydanticCustomError("missing", "needed in a message of the role 'tool'")
    return value


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class TextPart(_Part):
    type: Literal["text"]
    text: str


class Message(_Part):
    role: Role  # before the fields whose checks look at it
    content: Annotated[str, BeforeValidator(_content, json_schema_input_type=str | list[TextPart] | None)]
    name: str | None = None
    tool_calls: ToolCalls | None = None
    tool_call_id: Annotated[str | None, BeforeValidator(_tool_call_id), Field(validate_default=True)] = None
    reasoning_content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _calls_need_no_content(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("role") == "assistant" and value.get("tool_calls"):
            return {"content": None, **value}
        return value
