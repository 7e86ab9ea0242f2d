"""`FirstCall`: when an answer that may hold one call has it. Reads the text by itself, beside who renders it."""

from collections.abc import Callable

from deployments.tool_calls.answer_parts import AnswerParts, PartsOptions


class FirstCall:
    """Of one answer."""

    def __init__(self, options: PartsOptions) -> None:
        self._parts = AnswerParts(options)

    def is_whole_after(self, text: str) -> bool:
        """`text` is what is new of the answer."""
        self._parts.push(text, is_last=False)
        return self._parts.is_over


def until_first_call(options: PartsOptions | None) -> Callable[[], Callable[[str], bool]] | None:
    """As `TextOptions.until`; None where answers may go on after a call, or hold none."""
    if options is None or options.format is None or options.is_parallel:
        return None
    return lambda: FirstCall(options).is_whole_after
