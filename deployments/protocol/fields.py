"""Fields of completions and chats that clients write in several ways: their types, limits, and the one form they take
here. As clients send them they stand on the OpenAPI page.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_LOGPROBS = 20
MAX_LOGIT_BIASES = 1024
MAX_PRIORITY = 100
MAX_CACHE_SALT_CHARS = 256
MAX_EFFORT_CHARS = 32
#: what `chat_template_kwargs` cannot set: it says what is rendered, and how
RENDERING_ARGUMENTS = frozenset(
    {
        "self", "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
        "continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length",
        "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "kwargs",
    }
)  # fmt: skip

Prompt = str | list[int]
#: seconds from the request's arrival
Timeout = Annotated[float, Field(gt=0.0, allow_inf_nan=False)] | None


def _stop_list(value: Any) -> Any:
    """Clients send an empty string for no stop string."""
    if isinstance(value, str):
        return [value] if value else None
    if value is not None and not isinstance(value, list):
        raise ValueError("must be a string or a list of strings")
    if isinstance(value, list) and any(string == "" for string in value):
        raise ValueError("a stop string must not be empty")
    return value


def _logit_bias(value: Any) -> Any:
    """JSON keys are strings; here they become token ids."""
    if not isinstance(value, dict):
        return value
    if any(not (isinstance(key, str) and re.fullmatch(r"[0-9]{1,9}", key)) for key in value):
        raise ValueError("each key must be a token id written in digits")
    return {int(key): bias for key, bias in value.items()}


def _early_stopping(value: Any) -> Any:
    if value is None or isinstance(value, bool) or value == "never":
        return value
    raise ValueError("must be true, false or 'never'")


def _template_kwargs(value: Any) -> Any:
    if isinstance(value, dict) and (taken := sorted(value.keys() & RENDERING_ARGUMENTS)):
        raise ValueError(f"must not hold '{taken[0]}'")
    return value


def _prompts(value: Any) -> list[Prompt]:
    """All forms of `prompt` as a list of texts and lists of token ids."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError("must be a string, a list of token ids, or a list of either")
    if _are_token_ids(value):
        return [value]
    for prompt in value:
        if not isinstance(prompt, str) and not (isinstance(prompt, list) and _are_token_ids(prompt, or_empty=True)):
            raise ValueError("must be a string, a list of token ids, or a list of either")
    return value


def _are_token_ids(value: list[Any], *, or_empty: bool = False) -> bool:
    return (or_empty or bool(value)) and all(type(item) is int for item in value)


#: As clients send them, for the OpenAPI page.
_SentStopStrings = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_STRING_CHARS)]], Field(max_length=MAX_STOP_STRINGS)
]
_SentLogitBias = Annotated[
    dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Annotated[float, Field(ge=-100.0, le=100.0)]],
    Field(max_length=MAX_LOGIT_BIASES),
]

StopStrings = Annotated[
    list[Annotated[str, Field(max_length=MAX_STOP_STRING_CHARS)]] | None,
    Field(max_length=MAX_STOP_STRINGS),
    BeforeValidator(_stop_list, json_schema_input_type=str | _SentStopStrings | None),
]
LogitBias = Annotated[
    dict[int, Annotated[float, Field(ge=-100.0, le=100.0)]] | None,
    Field(max_length=MAX_LOGIT_BIASES),
    BeforeValidator(_logit_bias, json_schema_input_type=_SentLogitBias | None),
]
EarlyStopping = Annotated[
    bool | str | None,
    BeforeValidator(_early_stopping, json_schema_input_type=bool | Literal["never"] | None),
]
TemplateArguments = Annotated[dict[str, Any] | None, BeforeValidator(_template_kwargs)]
Prompts = Annotated[
    list[Prompt], BeforeValidator(_prompts, json_schema_input_type=Prompt | list[str] | list[list[int]])
]
