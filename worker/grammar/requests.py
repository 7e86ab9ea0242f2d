"""`RequestGrammars`: the grammars of an engine's requests. It alone ties compiler, tokenizer and requests together.

An engine runs without the package that compiles grammars; then every grammar is refused.
"""

from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from worker.grammar.errors import GrammarError
from worker.grammar.vocabulary import Vocabulary, vocabulary_of
from worker.text import Tokenizer
from worker.types import EngineRequest

if TYPE_CHECKING:
    from worker.grammar.compiler import CompiledGrammar, GrammarCompiler
    from worker.grammar.matcher import GrammarMatcher

#: what the compiler imports beyond what a model needs
GRAMMAR_PACKAGE = "llguidance"


class RequestGrammars:
    """The tokenizer in `folder` is loaded when the first request with a grammar comes."""

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._compiler = self._load_compiler()

    def prepare(self, request: EngineRequest) -> "Future[CompiledGrammar] | None":
        """What `matchers` would have to wait for; None: nothing. From any thread; returns at once."""
        grammar = request.params.grammar
        return None if grammar is None or self._compiler is None else self._compiler.submit(grammar)

    def matchers(self, request: EngineRequest, outputs: list[list[int]]) -> "dict[int, GrammarMatcher]":
        """By sample, each where its output stands in the request's grammar; empty without one.

        Waits for a grammar that is not compiled. Raises GrammarError and GrammarBusyError.
        """
        params = request.params
        if params.grammar is None:
            return {}
        if params.beam is not None:
            raise GrammarError("not together with a beam search")
        if self._compiler is None:
            raise GrammarError(f"the package {GRAMMAR_PACKAGE} is not installed here")
        compiled = self._compiler.compile(params.grammar)
        return {
            index: compiled.matcher(outputs[index], ignore_eos=params.ignore_eos) for index in request.open_samples
        }

    def close(self) -> None:
        """Ends the process that tries grammars, and the threads around it."""
        if self._compiler is not None:
            self._compiler.close()

    def _load_compiler(self) -> "GrammarCompiler | None":
        try:
            from worker.grammar.compiler import GrammarCompiler
        except ModuleNotFoundError as error:
            if error.name != GRAMMAR_PACKAGE:
                raise
            return None
        return GrammarCompiler(self._vocabulary)

    def _vocabulary(self) -> Vocabulary:
        return vocabulary_of(Tokenizer(self._folder), self._vocab_size, self._eos_token_ids)
