"""Deltas to OpenAI objects: what a rendering does, and `CompletionRendering`. Chats have a file of their own."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

from deployments.answers import Delta
from deployments.protocol.responses import (
    Envelope,
    TokenText,
    completion_logprobs,
    prompt_logprobs,
)


class Rendering(Protocol):
    """One response. `kind` and `chunk_kind` are the names of its objects."""

    kind: str
    chunk_kind: str

    def chunk_choices(self, delta: Delta) -> list[dict[str, Any]]:
        """The choices of the chunks that carry `delta`, one each."""
        ...

    def whole_choice(self, whole: Delta) -> dict[str, Any]: ...

    def whole_fields(self, wholes: list[Delta]) -> dict[str, Any]:
        """What a whole response has beside its choices."""
        ...


class CompletionRendering:
    """`num_logprobs`: alternatives to each token (None: no log-probabilities); with `echo` to those of the prompt too.
    `num_prompt_logprobs`: the same for the prompt alone, in a field of its own."""

    kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(
        self,
        token_text: TokenText,
        *,
        num_logprobs: int | None,
        echo: bool = False,
        num_prompt_logprobs: int | None = None,
    ) -> None:
        self._token_text = token_text
        self._num_logprobs = num_logprobs
        self._echo = echo
        self._num_prompt_logprobs = num_prompt_logprobs

    def chunk_choices(self, delta: Delta) -> list[dict[str, Any]]:
        return [self.whole_choice(delta)]

    def whole_choice(self, whole: Delta) -> dict[str, Any]:
        logprobs: dict[str, Any] | None = None
        if self._num_logprobs is not None:
            echoed = (whole.prompt or []) if self._echo else []
            logprobs = completion_logprobs(whole.logprobs, self._token_text, echoed, self._num_logprobs)
        choice: dict[str, Any] = {
            "index": whole.index,
            "text": whole.text,
            "logprobs": logprobs,
            "finish_reason": whole.finish_reason,
        }
        if self._num_prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(
                whole.prompt or [], self._token_text, self._num_prompt_logprobs
            )
        return choice

    def whole_fields(self, wholes: list[Delta]) -> dict[str, Any]:
        return {}


async def whole_answers(deltas: AsyncGenerator[Delta, None]) -> list[Delta]:
    """All deltas of each choice as one, by index."""
    wholes: dict[int, Delta] = {}
    texts: dict[int, list[str]] = {}
    async with aclosing(deltas):
        async for delta in deltas:
            whole = wholes.setdefault(delta.index, Delta(delta.index, "", 0))
            texts.setdefault(delta.index, []).append(delta.text)
            whole.num_tokens += delta.num_tokens
            whole.logprobs += delta.logprobs
            whole.finish_reason = delta.finish_reason
            whole.stop_string = delta.stop_string
            whole.num_cached_tokens += delta.num_cached_tokens
            whole.prompt = whole.prompt or delta.prompt
    for index, whole in wholes.items():
        whole.text = "".join(texts[index])
    return [wholes[index] for index in sorted(wholes)]


def whole_response(rendering: Rendering, envelope: Envelope, wholes: list[Delta]) -> dict[str, Any]:
    choices = [rendering.whole_choice(whole) for whole in wholes]
    return envelope.to_dict(rendering.kind, choices) | rendering.whole_fields(wholes)
