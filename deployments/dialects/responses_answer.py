"""Answers as OpenAI's response objects: the response, its output items, what they cost. Knows neither events nor where
answers come from.
"""

from dataclasses import dataclass
from typing import Any

from deployments.answers import Delta
from deployments.dialects.answer_blocks import AnswerBlocks, Block, Closed, Grew, Step
from deployments.dialects.responses_body import ResponsesRequest
from deployments.protocol.responses import TokenLogprob, TokenText, chat_logprobs
from deployments.tool_calls.answer_parts import PartsOptions

_ITEM_PREFIXES = {"text": "msg_", "reasoning": "rs_", "call": "fc_"}


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

    def to_dict(self, status: str, output: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        request = self.request
        text_format = None if request.text is None else request.text.format
        choice = request.tool_choice
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.created_s,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": self.model,
            "output": output,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": self.temperature,
            "text": {"format": {"type": "text"} if text_format is None else text_format.to_dict()},
            "tool_choice": (choice or "auto") if choice is None or isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in request.tools or []],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": self.top_p,
            "truncation": "disabled",
            "usage": usage,
            "user": request.user,
        }

    def usage(self, num_cached_tokens: int, num_output_tokens: int) -> dict[str, Any]:
        return {
            "input_tokens": self.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.num_prompt_tokens + num_output_tokens,
        }


class ResponseOutput:
    """The output items of one response and what they cost, as they come. `token_text` is None where no
    log-probabilities are; those that there are belong to texts, with which they are told: calls and reasoning have
    none."""

    def __init__(self, envelope: ResponseEnvelope, token_text: TokenText | None, parts: PartsOptions | None) -> None:
        self.envelope = envelope
        self._token_text = token_text
        self._blocks = AnswerBlocks(parts, is_never_empty=True)
        self._logprobs: dict[int, list[dict[str, Any]]] = {}
        self._untold: list[dict[str, Any]] = []
        self._num_tokens = 0
        self._num_cached_tokens = 0
        self.status = "in_progress"

    def add(self, delta: Delta) -> list[tuple[Step, list[dict[str, Any]]]]:
        """What it does to the items, with the log-probabilities that are told with each growth of a text."""
        self._num_tokens += delta.num_tokens
        self._num_cached_tokens += delta.num_cached_tokens
        self._untold += self._logprobs_of(delta.logprobs)
        is_last = delta.finish_reason is not None
        if is_last:
            self.status = "incomplete" if delta.finish_reason == "length" else "completed"
        steps = self._blocks.push(delta.text, is_last=is_last)
        if is_last and self._untold and isinstance(steps[-1], Closed):
            # Those of the tokens that end an answer, which have no text.
            steps.insert(len(steps) - 1, Grew(steps[-1].block, ""))
        return [(step, self._told_with(step)) for step in steps]

    def logprobs_of(self, block: Block) -> list[dict[str, Any]]:
        return self._logprobs.get(block.index, [])

    def item(self, block: Block, status: str | None = None) -> dict[str, Any]:
        """Whole, or as it begins: with `status`, and nothing in it."""
        is_begun = status is not None
        item: dict[str, Any] = {"id": item_id(block), "status": status or self._status_of(block)}
        if block.kind == "call":
            arguments = "" if is_begun else block.text
            call = {"call_id": f"call_{block.key}", "name": block.name, "arguments": arguments}
            return {"type": "function_call", **item, **call}
        content = [] if is_begun else [self.part(block)]
        if block.kind == "reasoning":
            return {"type": "reasoning", **item, "summary": [], "content": content}
        return {"type": "message", "role": "assistant", **item, "content": content}

    def part(self, block: Block) -> dict[str, Any]:
        """The content of a message or of reasoning, as far as it has come."""
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": self.logprobs_of(block)}

    def response(self) -> dict[str, Any]:
        usage = self.envelope.usage(self._num_cached_tokens, self._num_tokens)
        return self.envelope.to_dict(self.status, [self.item(block) for block in self._blocks.blocks], usage)

    def _status_of(self, block: Block) -> str:
        """Only the last one can be unfinished."""
        return self.status if block is self._blocks.blocks[-1] else "completed"

    def _told_with(self, step: Step) -> list[dict[str, Any]]:
        if not isinstance(step, Grew):
            return []
        told, self._untold = self._untold, []
        if step.block.kind != "text":
            return []
        self._logprobs.setdefault(step.block.index, []).extend(told)
        return told

    def _logprobs_of(self, entries: list[TokenLogprob]) -> list[dict[str, Any]]:
        if self._token_text is None:
            return []
        content: list[dict[str, Any]] = chat_logprobs(entries, self._token_text)["content"]
        return content


def item_id(block: Block) -> str:
    return _ITEM_PREFIXES[block.kind] + block.key
