"""`GrammarCompiler`: grammars ready to be followed, compiled off the caller's thread and kept, the last used longest.

A grammar is compiled in this process only after a trial in another one, which bounds the time that it takes here.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from llguidance import LLTokenizer

from worker.grammar.checks import GrammarChecks, GrammarLimits
from worker.grammar.library import compile_grammar, library_tokenizer
from worker.grammar.matcher import GrammarMatcher
from worker.grammar.starts import GrammarStarts
from worker.grammar.vocabulary import Vocabulary
from worker.types import GrammarSpec

#: nobody is kept from anything by a request that waits for its grammar
COMPILER_LIMITS = GrammarLimits(wait_s=30.0)


class CompiledGrammar:
    """Its answers go from one start, and from another one where one of them has asked too much of it."""

    def __init__(self, starts: GrammarStarts, vocabulary: Vocabulary) -> None:
        self._starts = starts
        self._vocabulary = vocabulary

    @property
    def is_spent(self) -> bool:
        """Whether no answer can go from it any more."""
        return self._starts.is_spent

    def matcher(self, output_token_ids: Sequence[int] = (), *, ignore_eos: bool = False) -> GrammarMatcher:
        """For an answer that has these tokens already. Raises GrammarError where the grammar does not allow them."""
        vocabulary = self._vocabulary
        return GrammarMatcher(
            self._starts,
            len(vocabulary.token_bytes),
            vocabulary.eos_token_ids,
            output_token_ids,
            ignore_eos=ignore_eos,
        )


class GrammarCompiler:
    """`submit` returns at once and may be called from any thread."""

    def __init__(self, vocabulary: Callable[[], Vocabulary], limits: GrammarLimits = COMPILER_LIMITS) -> None:
        """`vocabulary` is called in a thread of this object, when the first grammar comes."""
        self._load_vocabulary = vocabulary
        self._vocabulary: Vocabulary | None = None
        self._vocabulary_lock = threading.Lock()
        self._checks = GrammarChecks(self._vocabulary_once, limits)
        self._tokenizer: LLTokenizer | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar-compiler")
        self._compiled: OrderedDict[GrammarSpec, CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()

    def submit(self, spec: GrammarSpec) -> Future[CompiledGrammar]:
        """The compiled grammar, or GrammarError or GrammarBusyError."""
        known = self._known(spec)
        if known is not None:
            future: Future[CompiledGrammar] = Future()
            future.set_result(known)
            return future
        checked = self._checks.submit(spec)
        return self._thread.submit(self._compile, spec, checked)

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """As `submit`, waiting for it: at once for one that was compiled lately."""
        return self.submit(spec).result()

    def close(self) -> None:
        """Ends the trial's process."""
        self._checks.close()
        self._thread.shutdown(cancel_futures=True)

    def _compile(self, spec: GrammarSpec, checked: Future[str]) -> CompiledGrammar:
        grammar = checked.result()
        known = self._known(spec)
        if known is not None:
            return known
        vocabulary = self._vocabulary_once()
        if self._tokenizer is None:
            self._tokenizer = library_tokenizer(
                vocabulary.token_bytes, vocabulary.special_ids, vocabulary.eos_token_ids, vocabulary.encode
            )
        starts = GrammarStarts(partial(compile_grammar, self._tokenizer, grammar))
        compiled = CompiledGrammar(starts, vocabulary)
        with self._lock:
            self._compiled[spec] = compiled
            if len(self._compiled) > self._checks.limits.num_cached:
                self._compiled.popitem(last=False)
        return compiled

    def _known(self, spec: GrammarSpec) -> CompiledGrammar | None:
        with self._lock:
            compiled = self._compiled.get(spec)
            if compiled is None or compiled.is_spent:
                return None
            self._compiled.move_to_end(spec)
            return compiled

    def _vocabulary_once(self) -> Vocabulary:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = self._load_vocabulary()
            return self._vocabulary
