"""`GrammarStarts`: one grammar's start, from which all of its answers go, and another one where that has failed.

The library lets the copies of a matcher share one lexer. That makes all answers but the first cheap, and one that asks
too much of the lexer fails it for them all, for good. Knows no answers.
"""

import time
from collections.abc import Callable

from llguidance import LLMatcher

from worker.grammar.errors import GrammarError

#: Processor time that compiling may take where answers are under way: everybody's step waits for it.
MAX_RENEWAL_S = 0.25


class GrammarStarts:
    """`root` is the start that is good, as far as anybody knows; callers copy it. `is_spent`: it is not, and there is
    no other."""

    def __init__(self, compile_anew: Callable[[], LLMatcher]) -> None:
        """Compiles it. Raises GrammarError, as all that compiles."""
        self._compile = compile_anew
        began_s = time.thread_time()
        self.root = compile_anew()
        self._compile_s = time.thread_time() - began_s
        self.is_spent = False

    def renew(self, failed: LLMatcher) -> bool:
        """Whether the answer that went from `failed` is the first to tell: `root` is then another one. Raises
        GrammarError where compiling it would hold up everybody."""
        if failed is not self.root:
            return False
        self.is_spent = True  # until there is another
        if self._compile_s > MAX_RENEWAL_S:
            raise GrammarError("it asks too much of the grammar library, and takes too long to compile anew")
        self.root = self._compile()
        self.is_spent = False
        return True

    def alone(self) -> LLMatcher:
        """A start whose lexer nobody shares."""
        return self._compile()
