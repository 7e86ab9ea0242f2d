"""`ChatForms`: what tools and reasoning change of a chat, from its prompt to its answer. Owns which formats the model
has; knows no workers and no HTTP.
"""

import re
from collections.abc import Sequence
from typing import Any

from deployments.protocol.messages import Message
from deployments.protocol.requests import ChatRequest
from deployments.protocol.tools import Function
from deployments.tool_calls.answer_parts import PartsOptions
from deployments.tool_calls.formats import AUTO, tool_call_format
from deployments.tool_calls.prompting import template_messages, template_tools, told_messages
from deployments.tool_calls.reasoning import BEGIN
from worker.text import Tokenizer
from worker.types import GrammarSpec

_KNOWS_TOOLS = re.compile(r"\btools\b")
#: the opening tag and what templates write after it
_NUM_LAST_TOKENS = 16


class ChatForms:
    """Immutable. `tool_call_parser` and `reasoning_parser` are the options of these names."""

    def __init__(self, tokenizer: Tokenizer, tool_call_parser: str = AUTO, reasoning_parser: str = AUTO) -> None:
        template = tokenizer.chat_template or ""
        self._tokenizer = tokenizer
        self._format = tool_call_format(tool_call_parser, tokenizer)
        self._knows_tools = _KNOWS_TOOLS.search(template) is not None
        self._has_reasoning = BEGIN in template if reasoning_parser == AUTO else reasoning_parser == "think"

    def prompt(
        self, messages: Sequence[Message], functions: Sequence[Function]
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """(messages, options of the template)"""
        if self._knows_tools:
            return template_messages(messages), {"tools": template_tools(functions)} if functions else {}
        has_calls = any(message.tool_calls or message.role in ("tool", "function") for message in messages)
        if functions or has_calls:
            return told_messages(messages, functions, self._format), {}
        return template_messages(messages), {}

    def forced_grammar(self, request: ChatRequest) -> GrammarSpec | None:
        functions = request.forced_functions
        if not functions:
            return None
        is_parallel = request.tool_choice == "required" and request.parallel_tool_calls is not False
        return self._format.grammar(functions, is_parallel=is_parallel)

    def shows_special_tokens(self, request: ChatRequest) -> bool:
        """Whether calls can only be found where control tokens are shown."""
        return bool(request.offered_functions) and self._format.shows_special_tokens

    def parts(self, request: ChatRequest, prompt_token_ids: list[int]) -> PartsOptions | None:
        """How answers are taken apart; None where they are text alone. What is held to a grammar cannot reason."""
        functions = request.offered_functions
        has_reasoning = self._has_reasoning and request.grammar is None and not request.forced_functions
        if not functions and not has_reasoning:
            return None
        return PartsOptions(
            format=self._format if functions else None,
            tool_names=frozenset(function.name for function in functions),
            is_parallel=request.parallel_tool_calls is not False,
            has_reasoning=has_reasoning,
            is_reasoning_open=has_reasoning and self._ends_with_opening_tag(prompt_token_ids),
        )

    def _ends_with_opening_tag(self, token_ids: list[int]) -> bool:
        text = self._tokenizer.decode(token_ids[-_NUM_LAST_TOKENS:], skip_special_tokens=False)
        return text.rstrip().endswith(BEGIN)
