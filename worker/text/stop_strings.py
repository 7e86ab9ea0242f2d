"""Stop strings over streamed text. Knows neither tokens nor why text arrives in the pieces it does."""


class StopStrings:
    """Finds the earliest stop string in text that arrives in pieces.

    Invariant: the text held back is the longest suffix of what arrived that could still begin a stop string, so
    no part of a stop string ever leaves (unless `include_stop_str` asks for it, and then only whole).
    """

    def __init__(self, stop: list[str], include_stop_str: bool = False) -> None:
        if any(not string for string in stop):
            raise ValueError("a stop string must not be empty")
        self._stop = stop
        self._include = include_stop_str
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """The text that is safe to send now, and whether a stop string completed. After it did, text is dropped.

        Of several stop strings the one that completes first wins, and of those that complete with the same
        character the longest; so the outcome does not depend on the pieces in which the text arrives.
        """
        if self.matched is not None:
            return "", True
        text = self._held + text
        first_end = len(text) + 1
        for string in self._stop:
            start = text.find(string)
            if start < 0:
                continue
            end = start + len(string)
            if end < first_end or (end == first_end and len(string) > len(self.matched or "")):
                first_end, self.matched = end, string
        if self.matched is not None:
            self._held = ""
            return text[: first_end if self._include else first_end - len(self.matched)], True
        num_held = self._num_chars_to_hold(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], False

    def flush(self) -> str:
        """The text held back, at the end of the answer: the stop string that it could have begun did not come."""
        held, self._held = self._held, ""
        return held

    def _num_chars_to_hold(self, text: str) -> int:
        longest = 0
        for string in self._stop:
            for length in range(min(len(string) - 1, len(text)), longest, -1):
                if text.endswith(string[:length]):
                    longest = length
                    break
        return longest
