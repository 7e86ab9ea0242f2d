"""The bodies of `/v1/completions` and `/v1/chat/completions`: names, types and ranges of their fields.

Null means the default for every optional field. What depends on the model (its length, its vocabulary, its own
defaults) is checked in `sampling.py`.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field

from deployments.protocol.choices import check_choices
from deployments.protocol.errors import bad_request
from deployments.protocol.fields import (
    MAX_CACHE_SALT_CHARS,
    MAX_EFFORT_CHARS,
    MAX_LOGPROBS,
    MAX_PRIORITY,
    MAX_STOP_TOKEN_IDS,
    EarlyStopping,
    LogitBias,
    Prompts,
    StopStrings,
    TemplateArguments,
    Timeout,
)
from deployments.protocol.messages import MAX_MESSAGES, Message
from deployments.protocol.parsing import Refusals, parse_body
from deployments.protocol.structured import AnswerForm
from deployments.protocol.tools import Function, NamedChoice, ToolChoice, Tools, check_tools


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class StreamOptions(_Body):
    include_usage: bool | None = None


class GenerationRequest(_Body, AnswerForm):
    """The fields that both kinds of request share. Of the two limits `max_completion_tokens` wins."""

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: StopStrings = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=10.0)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    logit_bias: LogitBias = None
    n: Annotated[int, Field(ge=1)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    use_beam_search: bool | None = None
    beam_width: Annotated[int, Field(ge=1)] | None = None
    length_penalty: Annotated[float, Field(ge=-10.0, le=10.0)] | None = None
    early_stopping: EarlyStopping = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    timeout: Timeout = None
    cache_salt: Annotated[str, Field(max_length=MAX_CACHE_SALT_CHARS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    explain: bool | None = None

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Raises ApiError that names the field."""
        request = parse_body(cls, body, cls.refusals())
        request.check()
        return request

    @classmethod
    def refusals(cls) -> Refusals:
        return _REFUSED

    def check(self) -> None:
        """What no single field can tell."""
        if self.include_usage and not self.stream:
            raise bad_request("stream_options: only allowed when stream is true", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise bad_request("prompt_logprobs: not together with stream", "prompt_logprobs")
        check_choices(self)
        self.find_grammar(use_beam_search=bool(self.use_beam_search))

    @property
    def num_choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def num_candidates(self) -> int:
        """Answers that are generated for each prompt; the best `num_choices` of them are returned."""
        return self.best_of or self.num_choices

    @property
    def is_ranked(self) -> bool:
        """Whether answers are to be chosen by their log-probabilities. Beams come ranked."""
        return not self.use_beam_search and self.num_candidates > self.num_choices

    @property
    def max_tokens_field(self) -> str:
        """The name under which the limit was given."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives beside the chosen token; None: no log-probabilities."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for the tokens of the prompt."""
        return self.prompt_logprobs

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionRequest(GenerationRequest):
    """A limit of 0 computes the prompt alone: with `echo` and `logprobs`, or `prompt_logprobs`, it is scored."""

    max_tokens: Annotated[int, Field(ge=0)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    prompt: Prompts
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @classmethod
    def refusals(cls) -> Refusals:
        return {**_REFUSED, **_REFUSED_FOR_PROMPTS}

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in wanted if count is not None), default=None)


class ChatRequest(GenerationRequest):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    tools: Tools = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateArguments = None
    reasoning_effort: Annotated[str, Field(max_length=MAX_EFFORT_CHARS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs: only allowed when logprobs is true", "top_logprobs")
        check_tools(self)

    @property
    def template_arguments(self) -> dict[str, Any]:
        """Variables for the chat template. How much to reason is one, for models whose template knows it."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {**effort, **(self.chat_template_kwargs or {})}

    @property
    def offered_functions(self) -> list[Function]:
        """Those that the model is told of."""
        return [] if self.tool_choice == "none" else [tool.function for tool in self.tools or []]

    @property
    def forced_functions(self) -> list[Function]:
        """The answer must be a call of one of these; none: it may be what it will."""
        if isinstance(self.tool_choice, NamedChoice):
            return [function for function in self.offered_functions if function.name == self.tool_choice.function.name]
        return self.offered_functions if self.tool_choice == "required" else []

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


#: For chats alone.
_REFUSED_FOR_PROMPTS: Refusals = {
    "tools": ((None, []), "calling tools"),
    "tool_choice": ((None, "none", "auto"), "calling tools"),
}
#: Fields that would change the answer and are not there yet: the values that ask for nothing, and what is refused.
_REFUSED: Refusals = {
    "suffix": ((None, ""), "text after the completion"),
    "functions": ((None, []), "calling functions by this field; use tools instead"),
    "function_call": ((None, "none", "auto"), "forcing a call by this field; use tool_choice instead"),
    "chat_template": ((None,), "a chat template of the request's own"),
    "modalities": ((None, [], ["text"]), "output other than text"),
    "audio": ((None,), "output other than text"),
    "web_search_options": ((None,), "searching the web"),
    "moderation": ((None,), "moderation"),
    "add_generation_prompt": ((None, True), "a chat that the model does not answer"),
    "continue_final_message": ((None, False), "continuing the last message"),
    "documents": ((None, []), "documents beside the messages"),
    "truncate_prompt_tokens": ((None,), "cutting a prompt"),
    "allowed_token_ids": ((None, []), "a list of allowed tokens; use structured_outputs instead"),
    "bad_words": ((None, []), "a list of forbidden words; use logit_bias instead"),
    "logits_processors": ((None, []), "code in requests"),
    "prompt_embeds": ((None,), "a prompt of embeddings"),
}
