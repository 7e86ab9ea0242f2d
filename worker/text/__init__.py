"""Text at the edge of the engine: tokenizer, chat template, incremental detokenizer, stop strings."""

from worker.text.chat import ChatTemplateError
from worker.text.detokenizer import Detokenizer
from worker.text.stop_strings import StopStrings
from worker.text.tokenizer import Tokenizer, TokenizerError

__all__ = ["ChatTemplateError", "Detokenizer", "StopStrings", "Tokenizer", "TokenizerError"]
