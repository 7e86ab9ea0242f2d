"""Which format a model writes its calls in: by the option, else by the marks in its chat template."""

import re

from deployments.tool_calls.hermes import BEGIN as HERMES_MARK
from deployments.tool_calls.hermes import HermesFormat
from deployments.tool_calls.llama3_json import MARK as LLAMA3_MARK
from deployments.tool_calls.llama3_json import Llama3JsonFormat
from deployments.tool_calls.mistral import ARGUMENTS as MISTRAL_ARGUMENTS
from deployments.tool_calls.mistral import BEGIN as MISTRAL_MARK
from deployments.tool_calls.mistral import MistralFormat
from deployments.tool_calls.pieces import ToolCallFormat
from deployments.tool_calls.pythonic import PythonicFormat
from worker.text import Tokenizer

AUTO = "auto"
#: a list of Python calls as templates show it to models
_PYTHONIC = re.compile(r"\[\s*func_?name1?\(|\[\w+\(param")


def tool_call_format(name: str, tokenizer: Tokenizer) -> ToolCallFormat:
    """`name` is one of `names.ToolCallParserName`. Models whose template shows no calls are asked for
    Hermes', which most have seen."""
    chosen = _detected(tokenizer.chat_template or "") if name == AUTO else name
    if chosen == "mistral":
        marks = (tokenizer.token_id(MISTRAL_MARK), tokenizer.token_id(MISTRAL_ARGUMENTS))
        begin_id, arguments_id = (mark if mark in tokenizer.special_ids else None for mark in marks)
        has_names = MISTRAL_ARGUMENTS in (tokenizer.chat_template or "")
        return MistralFormat(begin_id, arguments_id, has_names=has_names)
    if chosen == "llama3_json":
        return Llama3JsonFormat(shows_special_tokens=tokenizer.token_id(LLAMA3_MARK) in tokenizer.special_ids)
    if chosen == "pythonic":
        return PythonicFormat()
    return HermesFormat(shows_special_tokens=tokenizer.token_id(HERMES_MARK) in tokenizer.special_ids)


def _detected(template: str) -> str:
    if HERMES_MARK in template:
        return "hermes"
    if MISTRAL_MARK in template:
        return "mistral"
    if _PYTHONIC.search(template):
        return "pythonic"
    if LLAMA3_MARK in template or ("ipython" in template and '"parameters"' in template):
        return "llama3_json"
    return "hermes"
