"""One line about a long run, on standard error: redrawn on a terminal, written now and then to a file."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

TERMINAL_PERIOD_S = 0.2
FILE_PERIOD_S = 10.0


class ProgressLine:
    """Use as a context: leaving it clears the line. Short runs show nothing in a file."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._is_terminal = stream.isatty()
        self._period_s = TERMINAL_PERIOD_S if self._is_terminal else FILE_PERIOD_S
        self._started_s = self._shown_s = clock()
        self._width = 0

    def update(self, num_finished: int, num_completions: int, num_tokens: int) -> None:
        def line(elapsed_s: float) -> str:
            rate = num_tokens / elapsed_s
            return f"{num_finished}/{num_completions} completions, {num_tokens} tokens, {rate:.1f} tokens/s"

        self.show(line)

    def show(self, line_after: Callable[[float], str]) -> None:
        """Show what `line_after` makes of the seconds since the start, if it is time to show something."""
        now = self._clock()
        if now - self._shown_s < self._period_s:
            return
        self._shown_s = now
        line = line_after(now - self._started_s)
        if self._is_terminal:
            self._stream.write("\r" + line.ljust(self._width))
            self._width = len(line)
        else:
            self._stream.write(line + "\n")
        self._stream.flush()

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()
