"""Reasoning before an answer, between <think> tags. Knows no calls."""

from deployments.tool_calls.calls_in_text import longest_beginning
from deployments.tool_calls.pieces import Piece, Reasoning

BEGIN, END = "<think>", "</think>"


class ReasoningSplitter:
    """Gives what is reasoning and returns what is not. `is_open`: the prompt ended with the opening tag."""

    def __init__(self, *, is_open: bool) -> None:
        self._is_reasoning: bool | None = True if is_open else None  # None: not known yet
        self._held = ""
        self._has_reasoning = False
        self._is_answer_due = False  # the line breaks before it are no part of it

    def push(self, text: str) -> tuple[list[Piece], str]:
        """(reasoning, the answer's own text)"""
        if self._is_reasoning is False:
            return [], self._answer(text)
        self._held += text
        if self._is_reasoning is None and not self._find_begin():
            return [], ""
        if not self._is_reasoning:
            held, self._held = self._held, ""
            return [], held
        end = self._held.find(END)
        if end >= 0:
            reasoning, rest = self._held[:end], self._held[end + len(END) :]
            self._is_reasoning, self._held = False, ""
            self._is_answer_due = True
            return self._pieces(reasoning.rstrip()), self._answer(rest)
        num_held = longest_beginning(self._held, END)
        kept = self._held[: len(self._held) - num_held]
        reasoning = kept.rstrip()  # white space is held back: it may be what stands before the tag
        self._held = self._held[len(reasoning) :]
        return self._pieces(reasoning), ""

    def flush(self) -> tuple[list[Piece], str]:
        held, self._held = self._held, ""
        return (self._pieces(held.rstrip()), "") if self._is_reasoning else ([], held)

    def _answer(self, text: str) -> str:
        if self._is_answer_due:
            text = text.lstrip("\n")
            self._is_answer_due = not text
        return text

    def _find_begin(self) -> bool:
        """Whether it is known by now if the answer begins with reasoning."""
        begun = self._held.lstrip()
        if not begun or (begun != BEGIN and BEGIN.startswith(begun)):
            return False
        self._is_reasoning = begun.startswith(BEGIN)
        if self._is_reasoning:
            self._held = begun.removeprefix(BEGIN)
        return True

    def _pieces(self, text: str) -> list[Piece]:
        if not self._has_reasoning:
            text = text.lstrip()
        self._has_reasoning = self._has_reasoning or bool(text)
        return [Reasoning(text)] if text else []
