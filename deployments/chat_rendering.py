"""Chat answers as OpenAI objects, streamed and whole: content, reasoning, tool calls. Knows no format of calls."""

import uuid
from typing import Any

from deployments.answers import Delta
from deployments.protocol.responses import TokenLogprob, TokenText, chat_logprobs, prompt_logprobs
from deployments.tool_calls.answer_parts import AnswerParts, PartsOptions
from deployments.tool_calls.pieces import CallArguments, CallBegin, Content, Piece, Reasoning


class ChatRendering:
    """`num_prompt_logprobs`: alternatives to each token of the prompt, in a field of its own. `parts`: how answers are
    taken apart (None: they are content alone)."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(
        self,
        token_text: TokenText,
        *,
        with_logprobs: bool,
        num_prompt_logprobs: int | None = None,
        parts: PartsOptions | None = None,
    ) -> None:
        self._token_text = token_text
        self._with_logprobs = with_logprobs
        self._num_prompt_logprobs = num_prompt_logprobs
        self._options = parts
        self._begun: dict[int, AnswerParts | None] = {}

    def chunk_choices(self, delta: Delta) -> list[dict[str, Any]]:
        choices = []
        if delta.index not in self._begun:
            self._begun[delta.index] = self._new_parts()
            choices.append(_choice(delta.index, {"role": "assistant", "content": ""}))
        pieces, finish_reason = self._pieces(self._begun[delta.index], delta)
        logprobs = self._logprobs(delta.logprobs)
        # Also without text: log-probabilities and ends must leave.
        if not pieces and (delta.logprobs or finish_reason is not None):
            choices.append(_choice(delta.index, {}))
        choices += [_choice(delta.index, _delta_of(piece)) for piece in pieces]
        if choices:
            if pieces or delta.logprobs or finish_reason is not None:
                choices[-max(1, len(pieces))]["logprobs"] = logprobs
            choices[-1]["finish_reason"] = finish_reason
        return choices

    def whole_choice(self, whole: Delta) -> dict[str, Any]:
        pieces, finish_reason = self._pieces(self._new_parts(), whole)
        return {
            "index": whole.index,
            "message": _message(pieces),
            "logprobs": self._logprobs(whole.logprobs),
            "finish_reason": finish_reason,
        }

    def whole_fields(self, wholes: list[Delta]) -> dict[str, Any]:
        """All choices have the same prompt."""
        if self._num_prompt_logprobs is None:
            return {}
        entries = wholes[0].prompt or []
        return {"prompt_logprobs": prompt_logprobs(entries, self._token_text, self._num_prompt_logprobs)}

    def _new_parts(self) -> AnswerParts | None:
        return None if self._options is None else AnswerParts(self._options)

    def _pieces(self, parts: AnswerParts | None, delta: Delta) -> tuple[list[Piece], str | None]:
        """And why the answer ended."""
        if parts is None:
            return [Content(delta.text)] if delta.text else [], delta.finish_reason
        pieces = parts.push(delta.text, is_last=delta.finish_reason is not None)
        is_call = parts.has_calls and delta.finish_reason == "stop"
        return pieces, "tool_calls" if is_call else delta.finish_reason

    def _logprobs(self, entries: list[TokenLogprob]) -> dict[str, Any] | None:
        return chat_logprobs(entries, self._token_text) if self._with_logprobs else None


def _choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _delta_of(piece: Piece) -> dict[str, Any]:
    if isinstance(piece, Content):
        return {"content": piece.text}
    if isinstance(piece, Reasoning):
        return {"reasoning_content": piece.text}
    if isinstance(piece, CallArguments):
        return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}
    return {"tool_calls": [{"index": piece.index, **_call(piece.name)}]}


def _message(pieces: list[Piece]) -> dict[str, Any]:
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    calls = [_call(piece.name) for piece in pieces if isinstance(piece, CallBegin)]
    for piece in pieces:
        if isinstance(piece, CallArguments):
            calls[piece.index]["function"]["arguments"] += piece.text
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
        message["content"] = content or None
    return message


def _call(name: str) -> dict[str, Any]:
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": {"name": name, "arguments": ""}}
