"""Answers as Anthropic's message objects, whole and as events. Knows nothing of where answers come from."""

from typing import Any

from deployments.answers import Delta
from deployments.dialects.messages_errors import messages_error_body
from deployments.dialects.named_events import Event
from deployments.protocol.errors import ApiError


def message_object(message_id: str, model: str, num_prompt_tokens: int, whole: Delta | None) -> dict[str, Any]:
    """Of a whole answer, or of one that begins (None)."""
    text = whole.text if whole is not None else ""
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [_text_block(text)] if text else [],
        "stop_reason": None if whole is None else stop_reason(whole),
        "stop_sequence": None if whole is None else whole.stop_string,
        "usage": usage(
            num_prompt_tokens,
            whole.num_cached_tokens if whole is not None else 0,
            whole.num_tokens if whole is not None else 0,
        ),
    }


def stop_reason(last: Delta) -> str:
    if last.stop_string is not None:
        return "stop_sequence"
    return "max_tokens" if last.finish_reason == "length" else "end_turn"


def usage(num_prompt_tokens: int, num_cached_tokens: int, num_output_tokens: int) -> dict[str, int]:
    """Tokens that came from the prefix cache are not among the `input_tokens`, as at Anthropic."""
    return {
        "input_tokens": num_prompt_tokens - num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached_tokens,
        "output_tokens": num_output_tokens,
    }


class MessageEvents:
    """One message as events (`EventRendering`): its single text block begins with its first text."""

    def __init__(self, message_id: str, model: str, num_prompt_tokens: int, request_id: str) -> None:
        self.response_id = message_id
        self._model = model
        self._num_prompt_tokens = num_prompt_tokens
        self._request_id = request_id
        self._num_cached_tokens = 0
        self._num_output_tokens = 0
        self._is_block_open = False
        self._last: Delta | None = None

    def begin(self, first: Delta) -> list[Event]:
        self._num_cached_tokens = first.num_cached_tokens
        message = message_object(self.response_id, self._model, self._num_prompt_tokens, None)
        message["usage"] = usage(self._num_prompt_tokens, self._num_cached_tokens, 0)
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def delta(self, delta: Delta) -> list[Event]:
        self._num_output_tokens += delta.num_tokens
        self._last = delta
        if not delta.text:
            return []
        events: list[Event] = []
        if not self._is_block_open:
            self._is_block_open = True
            events.append({"type": "content_block_start", "index": 0, "content_block": _text_block("")})
        text = {"type": "text_delta", "text": delta.text}
        events.append({"type": "content_block_delta", "index": 0, "delta": text})
        return events

    def end(self) -> list[Event]:
        assert self._last is not None
        events: list[Event] = [{"type": "content_block_stop", "index": 0}] if self._is_block_open else []
        end = {"stop_reason": stop_reason(self._last), "stop_sequence": self._last.stop_string}
        counts = usage(self._num_prompt_tokens, self._num_cached_tokens, self._num_output_tokens)
        events.append({"type": "message_delta", "delta": end, "usage": counts})
        events.append({"type": "message_stop"})
        return events

    def failure(self, error: ApiError) -> list[Event]:
        return [messages_error_body(error, self._request_id)]


def _text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "citations": None}
