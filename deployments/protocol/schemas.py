"""What OpenAI-like routes answer, for the OpenAPI page: it describes the dicts of `responses.py` and makes none.

A test holds real answers to these descriptions.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Described(BaseModel):
    """No field that is not described."""

    model_config = ConfigDict(extra="forbid")


class Error(Described):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(Described):
    error: Error


class Model(Described):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Described):
    object: Literal["list"]
    data: list[Model]


class PromptTokensDetails(Described):
    cached_tokens: int


class CompletionUsage(Described):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(Described):
    """An echoed prompt's first token has null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Described):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    prompt_logprobs: list[Any] | None = None


class Completion(Described):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: CompletionUsage
    explanation: dict[str, Any] | None = None


class TopLogprob(Described):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Described):
    content: list[TokenLogprob]
    refusal: None


class FunctionCall(Described):
    name: str
    arguments: str


class ToolCall(Described):
    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(Described):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Described):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(Described):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: CompletionUsage
    prompt_logprobs: list[Any] | None = None
    explanation: dict[str, Any] | None = None


class Status(Described):
    status: str
