"""The messages of a chat, as all dialects mean them: a role, text, and what there is of calls and reasoning."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationInfo, model_validator

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


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class TextPart(_Part):
    type: Literal["text"]
    text: str


class Message(_Part):
    role: Role  # before `content`, whose check looks at it
    content: Annotated[str, BeforeValidator(_content, json_schema_input_type=str | list[TextPart] | None)]
    name: str | None = None
    tool_calls: ToolCalls | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _calls_need_no_content(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("role") == "assistant" and value.get("tool_calls"):
            return {"content": None, **value}
        return value
