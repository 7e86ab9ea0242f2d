"""`AnswerParts`: one answer's text as reasoning, content and calls. Knows no format, and no shape of a response."""

from dataclasses import dataclass

from deployments.tool_calls.pieces import CallArguments, CallBegin, Content, Piece, ToolCallFormat, ToolCallParser
from deployments.tool_calls.reasoning import ReasoningSplitter


@dataclass(frozen=True, slots=True)
class PartsOptions:
    """How the text of a request's answers is taken apart: the format of calls (None: there are none to find), the
    functions that may be called, whether one answer may hold several calls, and whether it may begin with reasoning,
    or has begun with it in the prompt."""

    format: ToolCallFormat | None = None
    tool_names: frozenset[str] = frozenset()
    is_parallel: bool = True
    has_reasoning: bool = False
    is_reasoning_open: bool = False


class AnswerParts:
    """Of one answer. Without parallel calls those after the first are left out."""

    def __init__(self, options: PartsOptions) -> None:
        self._is_parallel = options.is_parallel
        self._reasoning: ReasoningSplitter | None = None
        self._parser: ToolCallParser | None = None
        if options.has_reasoning:
            self._reasoning = ReasoningSplitter(is_open=options.is_reasoning_open)
        if options.format is not None:
            self._parser = options.format.parser(options.tool_names)
        self.has_calls = False

    def push(self, text: str, *, is_last: bool) -> list[Piece]:
        pieces: list[Piece] = []
        if self._reasoning is not None:
            pieces, text = self._reasoning.push(text)
            if is_last:
                more, rest = self._reasoning.flush()
                pieces, text = pieces + more, text + rest
        if self._parser is None:
            found: list[Piece] = [Content(text)] if text else []
        else:
            found = self._parser.push(text) + (self._parser.flush() if is_last else [])
        pieces += [piece for piece in found if self._is_wanted(piece)]
        self.has_calls = self.has_calls or any(isinstance(piece, CallBegin) for piece in pieces)
        return pieces

    @property
    def is_over(self) -> bool:
        """Whether nothing that comes can be wanted: the one call that the answer may hold is whole."""
        return not self._is_parallel and self._parser is not None and self._parser.num_whole_calls > 0

    def _is_wanted(self, piece: Piece) -> bool:
        return self._is_parallel or not isinstance(piece, CallBegin | CallArguments) or piece.index == 0
