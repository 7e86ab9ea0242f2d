"""Answers as Anthropic's message objects, whole and as events. Knows nothing of where answers come from."""

import json
from typing import Any

from pydantic_core import from_json

from deployments.answers import Delta
from deployments.dialects.answer_blocks import AnswerBlocks, Block, Closed, Grew, Opened, Step
from deployments.dialects.messages_errors import messages_error_body
from deployments.dialects.named_events import Event
from deployments.protocol.errors import ApiError
from deployments.tool_calls.answer_parts import PartsOptions


def message_object(
    message_id: str, model: str, num_prompt_tokens: int, whole: Delta | None, parts: PartsOptions | None = None
) -> dict[str, Any]:
    """Of a whole answer, or of one that begins (None)."""
    blocks = AnswerBlocks(parts)
    if whole is not None:
        blocks.push(whole.text, is_last=True)
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [_block(block) for block in blocks.blocks],
        "stop_reason": None if whole is None else stop_reason(whole, has_calls=blocks.has_calls),
        "stop_sequence": None if whole is None else whole.stop_string,
        "usage": usage(
            num_prompt_tokens,
            whole.num_cached_tokens if whole is not None else 0,
            whole.num_tokens if whole is not None else 0,
        ),
    }


def stop_reason(last: Delta, *, has_calls: bool) -> str:
    if last.stop_string is not None:
        return "stop_sequence"
    if last.finish_reason == "length":
        return "max_tokens"
    return "tool_use" if has_calls else "end_turn"


def usage(num_prompt_tokens: int, num_cached_tokens: int, num_output_tokens: int) -> dict[str, int]:
    """Tokens that came from the prefix cache are not among the `input_tokens`, as at Anthropic."""
    return {
        "input_tokens": num_prompt_tokens - num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached_tokens,
        "output_tokens": num_output_tokens,
    }


class MessageEvents:
    """One message as events (`EventRendering`)."""

    def __init__(
        self, message_id: str, model: str, num_prompt_tokens: int, request_id: str, parts: PartsOptions | None = None
    ) -> None:
        self.response_id = message_id
        self._model = model
        self._num_prompt_tokens = num_prompt_tokens
        self._request_id = request_id
        self._num_cached_tokens = 0
        self._num_output_tokens = 0
        self._blocks = AnswerBlocks(parts)
        self._last: Delta | None = None

    def begin(self, first: Delta) -> list[Event]:
        self._num_cached_tokens = first.num_cached_tokens
        message = message_object(self.response_id, self._model, self._num_prompt_tokens, None)
        message["usage"] = usage(self._num_prompt_tokens, self._num_cached_tokens, 0)
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def delta(self, delta: Delta) -> list[Event]:
        self._num_output_tokens += delta.num_tokens
        self._last = delta
        return [_event(step) for step in self._blocks.push(delta.text, is_last=delta.finish_reason is not None)]

    def end(self) -> list[Event]:
        assert self._last is not None
        reason = stop_reason(self._last, has_calls=self._blocks.has_calls)
        end = {"stop_reason": reason, "stop_sequence": self._last.stop_string}
        counts = usage(self._num_prompt_tokens, self._num_cached_tokens, self._num_output_tokens)
        return [{"type": "message_delta", "delta": end, "usage": counts}, {"type": "message_stop"}]

    def failure(self, error: ApiError) -> list[Event]:
        return [messages_error_body(error, self._request_id)]


def _event(step: Step) -> Event:
    index = step.block.index
    if isinstance(step, Opened):
        empty = Block(index, step.block.kind, step.block.name, key=step.block.key)
        return {"type": "content_block_start", "index": index, "content_block": _block(empty)}
    if isinstance(step, Closed):
        return {"type": "content_block_stop", "index": index}
    return {"type": "content_block_delta", "index": index, "delta": _growth(step)}


def _growth(step: Grew) -> dict[str, str]:
    if step.block.kind == "text":
        return {"type": "text_delta", "text": step.text}
    if step.block.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": step.text}
    return {"type": "input_json_delta", "partial_json": step.text}


def _block(block: Block) -> dict[str, Any]:
    """Nobody signs reasoning here."""
    if block.kind == "text":
        return {"type": "text", "text": block.text, "citations": None}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "tool_use", "id": f"toolu_{block.key}", "name": block.name, "input": _input(block.text)}


def _input(arguments: str) -> dict[str, Any]:
    """The arguments of a call as an object: of a call that was cut, as far as they go; nothing of what is no JSON
    object, or what JSON on the wire cannot hold."""
    try:
        value = from_json(arguments or "{}", allow_partial="trailing-strings", allow_inf_nan=False)
        json.dumps(value, allow_nan=False)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
