"""Names of the options that say how a model writes calls and reasoning. Loads nothing, for the command line's sake."""

from typing import Literal

#: `auto` goes by the chat template
ToolCallParserName = Literal["auto", "hermes", "llama3_json", "mistral", "pythonic"]
ReasoningParserName = Literal["auto", "think", "none"]
