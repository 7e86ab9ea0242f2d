"""`CallsInText`: text in which calls stand between marks. The formats say which marks; this finds them."""

import re

from deployments.tool_calls.call_scanner import CallScanner
from deployments.tool_calls.pieces import CallArguments, CallBegin, Content, Piece

_SPACE = " \t\r\n"
_CALL_ID_MARK = "[CALL_ID]"
#: the name of a function, and the id that some models give their calls
_NAME = re.compile(r"(?P<name>[a-zA-Z0-9_.-]{1,128})(\s*\[CALL_ID\][a-zA-Z0-9]*)?")


class CallsInText:
    """Text before, between and after calls is content, without the white space around them. `begin` marks a call,
    after which come one or more JSON objects, parted by any of the characters of `between`, and then `end`, if any.
    `arguments_mark`, if any: after `begin` a name, this mark and the object of the arguments may stand instead."""

    def __init__(self, begin: str, end: str, between: str, arguments_mark: str = "") -> None:
        self._arguments_mark = arguments_mark
        self._begin = begin
        self._end = end
        self._between = between + _SPACE
        self._held = ""
        self._space = ""
        self._has_content = False
        self._is_in_calls = False
        self._scanner: CallScanner | None = None
        self._num_calls = 0

    @property
    def num_whole_calls(self) -> int:
        return self._num_calls

    def push(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while self._step(pieces):
            pass
        return pieces

    def flush(self) -> list[Piece]:
        """A call that was cut stays cut; a mark that did not come whole is text."""
        held, self._held = self._held, ""
        if self._scanner is not None:
            return self._give_up() if self._scanner.name is None else []
        if self._is_in_calls:
            return self._content(held) if _NAME.match(held) and self._arguments_mark else []
        pieces = self._content(held)
        if self._space and not self._num_calls:
            pieces.append(Content(self._space))
        return pieces

    def _step(self, pieces: list[Piece]) -> bool:
        """Whether there may be more to find in the text that is held."""
        if self._scanner is not None:
            return self._read_call(pieces)
        if self._is_in_calls:
            return self._between_calls(pieces)
        return self._find_begin(pieces)

    def _find_begin(self, pieces: list[Piece]) -> bool:
        start = self._held.find(self._begin)
        if start < 0:
            num_held = longest_beginning(self._held, self._begin)
            text, self._held = self._held[: len(self._held) - num_held], self._held[len(self._held) - num_held :]
            pieces += self._content(text)
            return False
        pieces += self._content(self._held[:start])
        self._space = ""
        self._held = self._held[start + len(self._begin) :]
        self._is_in_calls = True
        return True

    def _between_calls(self, pieces: list[Piece]) -> bool:
        self._held = self._held.lstrip(_SPACE)
        if self._arguments_mark and self._held:
            if self._held.startswith(self._begin):
                self._held = self._held[len(self._begin) :]
                return True
            if self._begin.startswith(self._held):
                return False
        self._held = self._held.lstrip(self._between)
        if not self._held or (self._end and self._held != self._end and self._end.startswith(self._held)):
            return False
        if self._end and self._held.startswith(self._end):
            self._held = self._held[len(self._end) :]
            self._is_in_calls = False
        elif self._held.startswith("{"):
            self._scanner = CallScanner()
        elif self._arguments_mark and (found := self._named_call()) is not None:
            if not found:
                return False
            self._scanner = CallScanner(found)
            pieces.append(CallBegin(self._num_calls, found))
        else:
            self._is_in_calls = False
        return True

    def _named_call(self) -> str | None:
        """The name before the arguments, which are held then; "" while there may be one, None where there is none."""
        match = _NAME.match(self._held)
        if match is None:
            return None
        rest = self._held[match.end() :].lstrip(_SPACE)
        if rest.startswith(self._arguments_mark):
            rest = rest[len(self._arguments_mark) :].lstrip(_SPACE)
        elif any(mark.startswith(rest) for mark in (self._arguments_mark, _CALL_ID_MARK)):
            return ""
        if rest and not rest.startswith("{"):
            return None
        if rest:
            self._held = rest
        return match["name"] if rest else ""

    def _read_call(self, pieces: list[Piece]) -> bool:
        scanner = self._scanner
        assert scanner is not None
        had_name = scanner.name is not None
        self._held = scanner.push(self._held)
        if scanner.is_no_call:
            pieces += self._give_up()
            return True
        if scanner.name is not None and not had_name:
            pieces.append(CallBegin(self._num_calls, scanner.name))
        if arguments := scanner.take_arguments():
            pieces.append(CallArguments(self._num_calls, arguments))
        if scanner.is_over:
            self._num_calls += 1
            self._scanner = None
        return scanner.is_over

    def _give_up(self) -> list[Piece]:
        """What was read of an object that turned out to be no call is text."""
        assert self._scanner is not None
        raw = self._scanner.raw
        self._scanner, self._is_in_calls = None, False
        return self._content(raw)

    def _content(self, text: str) -> list[Piece]:
        """White space is held back until text follows; none comes first."""
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if not self._has_content:
            kept = kept.lstrip() if self._num_calls else kept
        if not kept.strip():
            return []
        self._has_content = True
        return [Content(kept)]


def longest_beginning(text: str, mark: str) -> int:
    """Characters at the end of `text` that could begin `mark`."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
