"""The bodies of `/tokenize` and `/detokenize`, with vLLM's names."""

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field

from deployments.protocol.errors import bad_request
from deployments.protocol.messages import MAX_MESSAGES, Message
from deployments.protocol.parsing import Refusals, parse_body

_REFUSED: Refusals = {
    "continue_final_message": ((None, False), "continuing the last message"),
    "chat_template": ((None,), "a chat template of the request's own"),
}


class TokenizeRequest(BaseModel):
    """Either a `prompt` or `messages`. `add_special_tokens` is for prompts: a chat template writes its own."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
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
        return request


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    model: str | None = None
    tokens: list[int]

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Raises ApiError that names the field."""
        return parse_body(cls, body, {})
