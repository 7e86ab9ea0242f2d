"""Answers as OpenAI's response objects, whole and as events. Knows nothing of where answers come from."""

from dataclasses import dataclass
from typing import Any

from deployments.answers import Delta
from deployments.dialects.named_events import Event
from deployments.dialects.responses_body import ResponsesRequest
from deployments.protocol.errors import ApiError
from deployments.protocol.responses import TokenLogprob, TokenText, chat_logprobs


@dataclass(frozen=True, slots=True)
class ResponseEnvelope:
    """What all objects of one response share: what was asked, as it was understood. Times are in seconds."""

    response_id: str
    created_s: int
    model: str
    request: ResponsesRequest
    num_prompt_tokens: int
    temperature: float
    top_p: float

    @property
    def item_id(self) -> str:
        return "msg_" + self.response_id.removeprefix("resp_")

    def to_dict(self, status: str, output: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.created_s,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": self.request.instructions,
            "max_output_tokens": self.request.max_output_tokens,
            "metadata": self.request.metadata or {},
            "model": self.model,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": self.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": self.request.top_logprobs or 0,
            "top_p": self.top_p,
            "truncation": "disabled",
            "usage": usage,
            "user": self.request.user,
        }

    def usage(self, num_cached_tokens: int, num_output_tokens: int) -> dict[str, Any]:
        return {
            "input_tokens": self.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.num_prompt_tokens + num_output_tokens,
        }

    def message(self, status: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.item_id, "type": "message", "role": "assistant", "status": status, "content": parts}


class ResponseText:
    """The text of one response and what it cost, as it comes. `token_text` is None where no log-probabilities are."""

    def __init__(self, envelope: ResponseEnvelope, token_text: TokenText | None) -> None:
        self._envelope = envelope
        self._token_text = token_text
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._num_tokens = 0
        self._num_cached_tokens = 0
        self.status = "in_progress"

    def add(self, delta: Delta) -> list[dict[str, Any]]:
        """The log-probabilities of its tokens."""
        self._texts.append(delta.text)
        self._num_tokens += delta.num_tokens
        self._num_cached_tokens += delta.num_cached_tokens
        logprobs = self._logprobs_of(delta.logprobs)
        self._logprobs += logprobs
        if delta.finish_reason is not None:
            self.status = "incomplete" if delta.finish_reason == "length" else "completed"
        return logprobs

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def logprobs(self) -> list[dict[str, Any]]:
        return self._logprobs

    def part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self._logprobs}

    def item(self) -> dict[str, Any]:
        return self._envelope.message(self.status, [self.part()])

    def response(self) -> dict[str, Any]:
        usage = self._envelope.usage(self._num_cached_tokens, self._num_tokens)
        return self._envelope.to_dict(self.status, [self.item()], usage)

    def _logprobs_of(self, entries: list[TokenLogprob]) -> list[dict[str, Any]]:
        if self._token_text is None:
            return []
        content: list[dict[str, Any]] = chat_logprobs(entries, self._token_text)["content"]
        return content


class ResponseEvents:
    """One response as numbered events (`EventRendering`)."""

    def __init__(self, envelope: ResponseEnvelope, token_text: TokenText | None) -> None:
        self.response_id = envelope.response_id
        self._envelope = envelope
        self._text = ResponseText(envelope, token_text)
        self._place = {"item_id": envelope.item_id, "output_index": 0, "content_index": 0}
        self._num_events = 0

    def begin(self, first: Delta) -> list[Event]:
        begun = self._envelope.to_dict("in_progress", [])
        return [
            self._event("response.created", response=begun),
            self._event("response.in_progress", response=begun),
            self._event("response.output_item.added", output_index=0, item=self._envelope.message("in_progress", [])),
            self._event("response.content_part.added", **self._place, part=self._text.part()),
        ]

    def delta(self, delta: Delta) -> list[Event]:
        logprobs = self._text.add(delta)
        if not delta.text and not logprobs:
            return []
        return [self._event("response.output_text.delta", **self._place, delta=delta.text, logprobs=logprobs)]

    def end(self) -> list[Event]:
        text = self._text
        return [
            self._event("response.output_text.done", **self._place, text=text.text, logprobs=text.logprobs),
            self._event("response.content_part.done", **self._place, part=text.part()),
            self._event("response.output_item.done", output_index=0, item=text.item()),
            self._event(f"response.{text.status}", response=text.response()),
        ]

    def failure(self, error: ApiError) -> list[Event]:
        """What was said so far stands in the failed response, as unfinished."""
        failed = self._text.response() | {
            "status": "failed",
            "error": {"code": "server_error", "message": error.message},
        }
        return [self._event("response.failed", response=failed)]

    def _event(self, name: str, **fields: Any) -> Event:
        event = {"type": name, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return event
