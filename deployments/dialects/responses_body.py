"""The body of OpenAI's `/v1/responses`, and the chat that it means. Nothing is stored: every request says it all."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from deployments.protocol.errors import bad_request
from deployments.protocol.fields import MAX_LOGPROBS
from deployments.protocol.messages import MAX_MESSAGES, Message
from deployments.protocol.parsing import Refusals, parse_body
from deployments.protocol.requests import ChatRequest

_REFUSED: Refusals = {
    "previous_response_id": ((None,), "an earlier response: this server stores none, so send its items again; it"),
    "conversation": ((None,), "a stored conversation"),
    "background": ((None, False), "answering in the background"),
    "prompt": ((None,), "a stored prompt"),
    "truncation": ((None, "disabled"), "leaving out items by itself"),
    "tools": ((None, []), "calling tools"),
    "tool_choice": ((None, "none", "auto"), "calling tools"),
    "max_tool_calls": ((None,), "calling tools"),
    "moderation": ((None,), "moderation"),
    "context_management": ((None, []), "managing the context"),
}

_TEXT_PARTS = ("input_text", "output_text", "text")
_LOGPROBS = "message.output_text.logprobs"
#: parts of answers that a client asks for and that this server never makes
_ABSENT = ("reasoning.encrypted_content", "file_search_call.results", "web_search_call.results")
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


def _items(value: Any) -> Any:
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
        if kind != "message":
            raise ValueError(f"item {index} must be an object of type 'message'")
        items.append(item)
    return items


def _include(value: Any) -> Any:
    if isinstance(value, list) and any(name not in (_LOGPROBS, *_ABSENT) for name in value):
        raise ValueError(f"each must be one of {', '.join((_LOGPROBS, *_ABSENT))}")
    return value


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class InputTextPart(_Body):
    type: Literal["input_text", "output_text", "text"]
    text: str


class InputMessage(_Body):
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[str, BeforeValidator(_text_of, json_schema_input_type=str | list[InputTextPart])]


class TextFormat(_Body):
    type: Literal["text"]


class TextOptions(_Body):
    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesRequest(_Body):
    model: str
    input: Annotated[
        list[InputMessage],
        Field(min_length=1, max_length=MAX_MESSAGES),
        BeforeValidator(_items, json_schema_input_type=str | Annotated[list[InputMessage], Field(min_length=1)]),
    ]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    include: Annotated[
        list[str] | None, BeforeValidator(_include, json_schema_input_type=list[Literal[_LOGPROBS, *_ABSENT]] | None)
    ] = None
    text: TextOptions | None = None
    stream: bool | None = None
    metadata: Annotated[dict[str, str] | None, Field(max_length=16)] = None
    # Without effect here: nothing is stored, prompts are cached anyway, and there are no tools.
    store: bool | None = None
    parallel_tool_calls: bool | None = None
    stream_options: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Raises ApiError that names the field."""
        request = parse_body(cls, body, _REFUSED)
        if request.top_logprobs and not request.with_logprobs:
            raise bad_request(f"top_logprobs: only when include holds '{_LOGPROBS}'", "top_logprobs")
        return request

    @property
    def with_logprobs(self) -> bool:
        return self.include is not None and _LOGPROBS in self.include

    @property
    def chat(self) -> ChatRequest:
        """The same as a chat. All its values were checked here, under the names that the client knows."""
        return ChatRequest(
            model=self.model,
            messages=self._messages(),
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            logprobs=self.with_logprobs,
            top_logprobs=self.top_logprobs if self.with_logprobs else None,
            stream=self.stream,
        )

    def _messages(self) -> list[Message]:
        """Instructions and what systems or developers say first are one message: most templates take only one."""
        rest = list(self.input)
        leading = [self.instructions] if self.instructions else []
        while rest and rest[0].role in _SYSTEM_ROLES:
            leading.append(rest.pop(0).content)
        messages = [Message(role="system", content="\n\n".join(leading))] if leading else []
        return messages + [
            Message(role="system" if item.role == "developer" else item.role, content=item.content) for item in rest
        ]
