"""Response and chunk objects of the OpenAI protocol, as plain dicts. Knows nothing of where answers come from."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deployments.prompt_entries import PromptEntry
from worker.types import TokenLogprobs

#: JSON has no minus infinity; OpenAI shows this for a token that could not be.
LOGPROB_FLOOR = -9999.0

#: (token id) -> (its text, its bytes)
TokenText = Callable[[int], tuple[str, bytes]]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token of an answer with its log-probabilities; `text_offset` counts characters of the choice's text."""

    token_id: int
    logprobs: TokenLogprobs
    text_offset: int


@dataclass(slots=True)
class Usage:
    """Each prompt counts once, however many answers it has; every generated answer counts, returned or not."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True)
class Envelope:
    """What all objects of one response share."""

    response_id: str
    created: int
    model: str
    system_fingerprint: str

    def to_dict(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.response_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            "choices": choices,
        }


def model_object(model: str, created: int, max_model_len: int) -> dict[str, Any]:
    return {
        "id": model,
        "object": "model",
        "created": created,
        "owned_by": "stallfree",
        "max_model_len": max_model_len,
    }


def chat_logprobs(entries: list[TokenLogprob], token_text: TokenText) -> dict[str, Any]:
    content = []
    for entry in entries:
        chosen, alternatives = entry.logprobs
        top = [_chat_token(token_id, logprob, token_text) for token_id, logprob in alternatives]
        content.append(_chat_token(entry.token_id, chosen, token_text) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(
    entries: list[TokenLogprob], token_text: TokenText, echoed: list[PromptEntry], num_alternatives: int
) -> dict[str, Any]:
    """Those of the `echoed` prompt, then the answer's. `top_logprobs` holds the best alternatives and always the
    token itself; of two tokens with one text (parts of characters) the likelier is shown. A prompt's first token has
    null in both."""
    logprobs: list[float | None] = []
    top: list[dict[str, float] | None] = []
    for prompt_entry in echoed:
        if prompt_entry.logprobs is None:
            logprobs.append(None)
            top.append(None)
            continue
        own, _, alternatives = prompt_entry.logprobs
        logprobs.append(finite(own))
        top.append(_shown(prompt_entry.token_id, own, alternatives[:num_alternatives], token_text))
    for entry in entries:
        own, alternatives = entry.logprobs
        logprobs.append(finite(own))
        top.append(_shown(entry.token_id, own, alternatives, token_text))
    tokens: list[PromptEntry | TokenLogprob] = [*echoed, *entries]
    return {
        "tokens": [token_text(token.token_id)[0] for token in tokens],
        "token_logprobs": logprobs,
        "top_logprobs": top,
        "text_offset": [token.text_offset for token in tokens],
    }


def prompt_logprobs(
    entries: list[PromptEntry], token_text: TokenText, num_alternatives: int
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's field: null for the first token; for each other one the token itself and the best alternatives, by id."""
    shown: list[dict[str, dict[str, Any]] | None] = []
    for entry in entries:
        if entry.logprobs is None:
            shown.append(None)
            continue
        own, own_rank, alternatives = entry.logprobs
        ranked = {entry.token_id: (own, own_rank)}
        for rank, (token_id, logprob) in enumerate(alternatives[:num_alternatives], 1):
            ranked.setdefault(token_id, (logprob, rank))
        shown.append(
            {
                str(token_id): {
                    "logprob": finite(logprob),
                    "rank": rank,
                    "decoded_token": token_text(token_id)[0],
                }
                for token_id, (logprob, rank) in ranked.items()
            }
        )
    return shown


def _shown(
    token_id: int, own: float, alternatives: list[tuple[int, float]], token_text: TokenText
) -> dict[str, float]:
    shown: dict[str, float] = {}
    for shown_id, logprob in [*alternatives, (token_id, own)]:
        text = token_text(shown_id)[0]
        shown[text] = max(shown.get(text, LOGPROB_FLOOR), finite(logprob))
    return shown


def finite(logprob: float) -> float:
    """Never below the floor; what is not a number is the floor."""
    return logprob if logprob > LOGPROB_FLOOR else LOGPROB_FLOOR


def _chat_token(token_id: int, logprob: float, token_text: TokenText) -> dict[str, Any]:
    text, piece = token_text(token_id)
    return {"token": text, "logprob": finite(logprob), "bytes": list(piece)}
