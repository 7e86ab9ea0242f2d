"""`CallScanner`: one call written as a JSON object, read while it arrives. Knows JSON, no format around it."""

from deployments.protocol.nesting import json_in_text

_ARGUMENT_KEYS = ("arguments", "parameters")
#: what a call may hold; an object that begins otherwise is no call
_KEYS = ("name", "type", "id", *_ARGUMENT_KEYS)
_SPACE = " \t\r\n"


class CallScanner:
    """Invariant: what `take_arguments` gave so far is a beginning of the JSON text of the arguments, and `raw` is all
    that was read of the object until its name was known, after which it is a call for certain."""

    def __init__(self, name: str | None = None) -> None:
        """With a `name`, which stood before, the object that is read is that of the arguments alone."""
        self.name = name
        self._is_bare = name is not None
        self.raw = ""
        self.is_over = False
        self.is_no_call = False
        self._depth = 1 if self._is_bare else 0
        self._is_in_string = False
        self._is_escaped = False
        self._key: str | None = _ARGUMENT_KEYS[0] if self._is_bare else None
        self._is_value = self._is_bare
        self._token = ""
        self._is_streaming = False
        self._has_arguments = False
        self._arguments = ""

    def push(self, text: str) -> str:
        """Reads up to the object's end; returns what comes after it. Once `is_no_call`, nothing more is read."""
        for position, char in enumerate(text):
            if self.is_over or self.is_no_call:
                return text[position:]
            if self.name is None:
                self.raw += char
            self._read(char)
        return ""

    def take_arguments(self) -> str:
        """What is new of them; nothing before the name is known."""
        if self.name is None:
            return ""
        new, self._arguments = self._arguments, ""
        return new

    def _read(self, char: str) -> None:
        if self._is_in_string:
            self._read_in_string(char)
        elif self._depth == 0:
            if char == "{":
                self._depth = 1
            elif char not in _SPACE:
                self.is_no_call = True
        elif self._depth == 1 and not self._is_value:
            self._read_key(char)
        else:
            self._read_value(char)

    def _read_in_string(self, char: str) -> None:
        self._add(char)
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._is_in_string = False

    def _read_key(self, char: str) -> None:
        if char == '"' and not self._token:
            self._is_in_string = True
            self._add(char)
        elif char == ":" and self._token:
            self._key, self._token, self._is_value = _parsed(self._token), "", True
            self.is_no_call = self.name is None and self._key not in _KEYS
        elif char == "}" and not self._token:
            self._end_object()
        elif char not in _SPACE and char != ",":
            self.is_no_call = self.name is None

    def _read_value(self, char: str) -> None:
        if self._depth == 1 and char in ",}":
            self._end_value()
            if char == "}":
                self._end_object()
            return
        if char in "{[":
            if self._depth == 1 and self._key in _ARGUMENT_KEYS:
                self._is_streaming = self._has_arguments = True
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        elif char == '"':
            self._is_in_string = True
        self._add(char)
        if self._depth == 1 and char in "}]":
            self._is_streaming = False
            self.is_over = self._is_bare

    def _add(self, char: str) -> None:
        if self._is_streaming:
            self._arguments += char
        else:
            self._token += char

    def _end_value(self) -> None:
        value = self._token.strip()
        if self._key == "name":
            self.name = _parsed(value)
            self.is_no_call = self.name is None
        elif self._key in _ARGUMENT_KEYS and not self._has_arguments:
            self._has_arguments = True
            # Some models write the arguments as a string of JSON, or null for none.
            self._arguments = "{}" if value == "null" else _parsed(value) or value
        self._key, self._token, self._is_value = None, "", False

    def _end_object(self) -> None:
        self._depth = 0
        self.is_over = True
        self.is_no_call = self.name is None
        if not self._has_arguments:
            self._arguments = "{}"


def _parsed(text: str) -> str | None:
    """The string that this JSON text is; None if it is none."""
    try:
        value = json_in_text(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
