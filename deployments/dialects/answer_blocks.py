"""`AnswerBlocks`: one answer as blocks that follow each other: text, reasoning, calls. Knows no dialect's names."""

import uuid
from dataclasses import dataclass, field
from typing import Literal

from deployments.tool_calls.answer_parts import AnswerParts, PartsOptions
from deployments.tool_calls.pieces import CallBegin, Content, Piece, Reasoning

Kind = Literal["text", "reasoning", "call"]


@dataclass(slots=True)
class Block:
    """Blocks are numbered from 0. `key` tells it from all others; dialects make ids of it."""

    index: int
    kind: Kind
    name: str = ""
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """What there is of it so far: of a call, the JSON text of its arguments."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Opened:
    block: Block


@dataclass(frozen=True, slots=True)
class Grew:
    block: Block
    text: str


@dataclass(frozen=True, slots=True)
class Closed:
    block: Block


Step = Opened | Grew | Closed


class AnswerBlocks:
    """Invariant: no block but the last is open. `options`: how the answer is taken apart; None: it is text alone.
    `is_never_empty`: an answer of nothing has one block, an empty text."""

    def __init__(self, options: PartsOptions | None, *, is_never_empty: bool = False) -> None:
        self._is_never_empty = is_never_empty
        self._parts = None if options is None else AnswerParts(options)
        self._is_open = False
        self.blocks: list[Block] = []

    @property
    def has_calls(self) -> bool:
        return any(block.kind == "call" for block in self.blocks)

    def push(self, text: str, *, is_last: bool) -> list[Step]:
        """What this text of the answer does to its blocks. After the last one all are closed."""
        pieces: list[Piece] = [Content(text)] if text else []
        if self._parts is not None:
            pieces = self._parts.push(text, is_last=is_last)
        if is_last and self._is_never_empty and not pieces and not self.blocks:
            pieces = [Content("")]
        steps = [step for piece in pieces for step in self._take(piece)]
        return steps + self._close() if is_last else steps

    def _take(self, piece: Piece) -> list[Step]:
        if isinstance(piece, CallBegin):
            return [*self._close(), self._open("call", piece.name)]
        kind: Kind = "text" if isinstance(piece, Content) else "reasoning" if isinstance(piece, Reasoning) else "call"
        steps: list[Step] = []
        if not self._is_open or self.blocks[-1].kind != kind:
            assert kind != "call", "arguments follow the beginning of their call"
            steps = [*self._close(), self._open(kind)]
        block = self.blocks[-1]
        block.pieces.append(piece.text)
        return [*steps, Grew(block, piece.text)] if piece.text else steps

    def _open(self, kind: Kind, name: str = "") -> Opened:
        self.blocks.append(Block(len(self.blocks), kind, name))
        self._is_open = True
        return Opened(self.blocks[-1])

    def _close(self) -> list[Step]:
        was_open, self._is_open = self._is_open, False
        return [Closed(self.blocks[-1])] if was_open else []
