"""What the other dialects answer, for the OpenAPI page: it describes the dicts of their `*_answer.py` and makes none.

A test holds real answers to these descriptions.
"""

from typing import Any, Literal

from deployments.protocol.schemas import Described, TokenLogprob


class Tokenized(Described):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Described):
    prompt: str


class Version(Described):
    version: str


class MessagesErrorDetail(Described):
    type: str
    message: str


class MessagesError(Described):
    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str


class TextBlock(Described):
    type: Literal["text"]
    text: str
    citations: None


class ThinkingBlock(Described):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(Described):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(Described):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnthropicMessage(Described):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage
    explanation: dict[str, Any] | None = None


class TokenCount(Described):
    input_tokens: int


class OutputText(Described):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class OutputMessage(Described):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Literal["completed", "incomplete"]
    content: list[OutputText]


class OutputCall(Described):
    id: str
    type: Literal["function_call"]
    status: Literal["completed", "incomplete"]
    call_id: str
    name: str
    arguments: str


class ReasoningText(Described):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(Described):
    id: str
    type: Literal["reasoning"]
    status: Literal["completed", "incomplete"]
    summary: list[Any]
    content: list[ReasoningText]


class InputTokensDetails(Described):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Described):
    reasoning_tokens: int


class ResponseUsage(Described):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(Described):
    reason: Literal["max_output_tokens"]


class ResponseObject(Described):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    background: Literal[False]
    error: None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage | OutputCall | OutputReasoning]
    parallel_tool_calls: bool
    previous_response_id: None
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[Any]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage
    user: str | None
    explanation: dict[str, Any] | None = None
