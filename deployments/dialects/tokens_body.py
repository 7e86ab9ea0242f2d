"""The bodies of `/tokenize` and `/detokenize`, with vLLM's names."""

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field

from deployments.protocol.errors import bad_request
from deployments.protocol.fields import MAX_EFFORT_CHARS, TemplateArguments
from deployments.protocol.messages import MAX_MESSAGES, Message
from deployments.protocol.parsing import Refusals, parse_body
from deployments.protocol.requests import ChatRequest
from deployments.protocol.tools import ToolChoice, Tools

_REFUSED: Refusals = {
    "continue_final_message": ((None, False), "continuing the last message"),
    "chat_template": ((None,), "a chat template of the request's own"),
    "documents": ((None, []), "documents beside the messages"),
}
#: what else the prompt of a chat is made of
_FOR_MESSAGES = ("tools", "tool_choice", "chat_template_kwargs", "reasoning_effort")


class TokenizeRequest(BaseModel):
    """Either a `prompt` or `messages` with what a chat has beside them. `add_special_tokens` is for prompts: a chat
    template writes its own."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: Tools = None
    tool_choice: ToolChoice = None
    chat_template_kwargs: TemplateArguments = None
    reasoning_effort: Annotated[str, Field(max_length=MAX_EFFORT_CHARS)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Raises ApiError that names the field."""
        request = parse_body(cls, body, _REFUSED)
        if (request.prompt is None) == (request.messages is None):
            raise bad_request("prompt: exactly one of 'prompt' and 'messages' must be given", "prompt")
        if request.messages is not None and request.add_special_tokens:
            raise bad_request("add_special_tokens: not for messages, whose template writes them", "add_special_tokens")
        if request.messages is None:
            for name in _FOR_MESSAGES:
                if getattr(request, name) not in (None, {}, "none", "auto"):
                    raise bad_request(f"{name}: not for a prompt, only for messages", name)
        else:
            request.chat.check()
        return request

    @cached_property
    def chat(self) -> ChatRequest:
        """The chat whose prompt is asked for. Only for messages."""
        shared = {name: getattr(self, name) for name in _FOR_MESSAGES}
        return ChatRequest(model=self.model or "", messages=self.messages or [], **shared)


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    model: str | None = None
    tokens: list[int]

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Raises ApiError that names the field."""
        return parse_body(cls, body, {})
