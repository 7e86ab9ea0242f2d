"""What an answer's text is made of, and what finds it. Knows no format."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from deployments.protocol.tools import Function
from worker.types import GrammarSpec


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """Calls of an answer are numbered from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Piece = Content | Reasoning | CallBegin | CallArguments


class ToolCallParser(Protocol):
    """Of one answer. The pieces do not depend on how its text is cut, but for where contents and arguments are."""

    @property
    def num_whole_calls(self) -> int:
        """Calls that have come to their end."""
        ...

    def push(self, text: str) -> list[Piece]: ...

    def flush(self) -> list[Piece]:
        """What is left at the end of the answer, finished or not."""
        ...


class ToolCallFormat(Protocol):
    """How a family of models writes calls. `shows_special_tokens`: its marks are control tokens, which an answer's text
    must show for them to be found."""

    name: str
    shows_special_tokens: bool

    def parser(self, tool_names: frozenset[str]) -> ToolCallParser: ...

    def grammar(self, functions: Sequence[Function], *, is_parallel: bool) -> GrammarSpec:
        """Forces a call of one of these, or several if `is_parallel`, and nothing else."""
        ...

    def written(self, name: str, arguments: str) -> str:
        """A call as the model would write it, for templates that know none."""
        ...
