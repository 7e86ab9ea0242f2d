"""Answers of `/v1/responses` as numbered events. Knows nothing of where answers come from."""

from typing import Any

from deployments.answers import Delta
from deployments.dialects.answer_blocks import Block, Closed, Opened, Step
from deployments.dialects.named_events import Event
from deployments.dialects.responses_answer import ResponseOutput, item_id
from deployments.protocol.errors import ApiError

#: the events of a block's growth and of its whole text are named after these
_NAMES = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}


class ResponseEvents:
    """One response as events (`EventRendering`)."""

    def __init__(self, output: ResponseOutput) -> None:
        self.response_id = output.envelope.response_id
        self._output = output
        self._num_events = 0

    def begin(self, first: Delta) -> list[Event]:
        begun = self._output.envelope.to_dict("in_progress", [])
        return [
            self._event("response.created", response=begun),
            self._event("response.in_progress", response=begun),
        ]

    def delta(self, delta: Delta) -> list[Event]:
        return [event for step, logprobs in self._output.add(delta) for event in self._of_step(step, logprobs)]

    def end(self) -> list[Event]:
        return [self._event(f"response.{self._output.status}", response=self._output.response())]

    def failure(self, error: ApiError) -> list[Event]:
        """What was said so far stands in the failed response, as unfinished."""
        failed = self._output.response() | {
            "status": "failed",
            "error": {"code": "server_error", "message": error.message},
        }
        return [self._event("response.failed", response=failed)]

    def _of_step(self, step: Step, logprobs: list[dict[str, Any]]) -> list[Event]:
        block = step.block
        if isinstance(step, Opened):
            return self._opened(block)
        if isinstance(step, Closed):
            return self._closed(block)
        growth: dict[str, Any] = {"delta": step.text}
        if block.kind == "text":
            growth["logprobs"] = logprobs
        elif not step.text:
            return []
        return [self._event(f"response.{_NAMES[block.kind]}.delta", **_place(block), **growth)]

    def _opened(self, block: Block) -> list[Event]:
        item = self._output.item(block, "in_progress")
        events = [self._event("response.output_item.added", output_index=block.index, item=item)]
        if block.kind != "call":
            part = self._output.part(Block(block.index, block.kind, key=block.key))
            events.append(self._event("response.content_part.added", **_place(block), part=part))
        return events

    def _closed(self, block: Block) -> list[Event]:
        done: dict[str, Any] = {"arguments" if block.kind == "call" else "text": block.text}
        if block.kind == "text":
            done["logprobs"] = self._output.logprobs_of(block)
        events = [self._event(f"response.{_NAMES[block.kind]}.done", **_place(block), **done)]
        if block.kind != "call":
            events.append(
                self._event("response.content_part.done", **_place(block), part=self._output.part(block))
            )
        item = self._output.item(block)
        events.append(self._event("response.output_item.done", output_index=block.index, item=item))
        return events

    def _event(self, name: str, **fields: Any) -> Event:
        event = {"type": name, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return event


def _place(block: Block) -> dict[str, Any]:
    """Items of messages and reasoning hold one part each, calls none."""
    place: dict[str, Any] = {"item_id": item_id(block), "output_index": block.index}
    return place if block.kind == "call" else {**place, "content_index": 0}
