"""The body of OpenAI's `/v1/responses`, and the chat that it means. Nothing is stored: every request says it all."""

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from deployments.dialects.responses_items import InputItem, chat_messages, items_of
from deployments.dialects.responses_tools import ResponseTool, ResponseToolChoice, TextOptions, chat_choice
from deployments.protocol.errors import bad_request
from deployments.protocol.fields import MAX_EFFORT_CHARS, MAX_LOGPROBS, Timeout
from deployments.protocol.messages import MAX_MESSAGES
from deployments.protocol.parsing import Refusals, parse_body
from deployments.protocol.requests import ChatRequest
from deployments.protocol.tools import MAX_TOOLS

_REFUSED: Refusals = {
    "previous_response_id": ((None,), "an earlier response; none is stored here, so send its items again"),
    "conversation": ((None,), "a stored conversation"),
    "background": ((None, False), "answering in the background"),
    "prompt": ((None,), "a stored prompt"),
    "truncation": ((None, "disabled"), "leaving out items by itself"),
    "max_tool_calls": ((None,), "a limit on calls of tools that a server runs"),
    "moderation": ((None,), "moderation"),
    "context_management": ((None, []), "managing the context"),
}

_LOGPROBS = "message.output_text.logprobs"
#: parts of answers that a client asks for and that this server never makes
_ABSENT = ("reasoning.encrypted_content", "file_search_call.results", "web_search_call.results")


def _include(value: Any) -> Any:
    if isinstance(value, list) and any(name not in (_LOGPROBS, *_ABSENT) for name in value):
        raise ValueError(f"each must be one of {', '.join((_LOGPROBS, *_ABSENT))}")
    return value


class Reasoning(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    effort: Annotated[str, Field(max_length=MAX_EFFORT_CHARS)] | None = None


class ResponsesRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    model: str
    input: Annotated[
        list[InputItem],
        Field(min_length=1, max_length=MAX_MESSAGES),
        BeforeValidator(items_of, json_schema_input_type=str | Annotated[list[InputItem], Field(min_length=1)]),
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
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ResponseToolChoice = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    metadata: Annotated[dict[str, str] | None, Field(max_length=16)] = None
    reasoning: Reasoning | None = None
    # Without effect here: nothing is stored, and prompts are cached anyway.
    store: bool | None = None
    stream_options: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    timeout: Timeout = None
    explain: bool | None = None

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Raises ApiError that names the field."""
        request = parse_body(cls, body, _REFUSED)
        if request.top_logprobs and not request.with_logprobs:
            raise bad_request(f"top_logprobs: only when include holds '{_LOGPROBS}'", "top_logprobs")
        request.chat.check()
        return request

    @property
    def with_logprobs(self) -> bool:
        return self.include is not None and _LOGPROBS in self.include

    @cached_property
    def chat(self) -> ChatRequest:
        """The same as a chat. All its values were checked here, under the names that the client knows."""
        chat = ChatRequest(
            model=self.model,
            messages=chat_messages(self.instructions, self.input),
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            logprobs=self.with_logprobs,
            top_logprobs=self.top_logprobs if self.with_logprobs else None,
            stream=self.stream,
            timeout=self.timeout,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            tools=[tool.tool for tool in self.tools or []] or None,
            tool_choice=chat_choice(self.tool_choice, has_tools=bool(self.tools)),
            parallel_tool_calls=self.parallel_tool_calls,
        )
        form = None if self.text is None or self.text.format is None else self.text.format
        if form is not None and (grammar := form.grammar()) is not None:
            chat.hold_to(grammar, form.grammar_field)
        return chat
