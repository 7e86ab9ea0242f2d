"""`GrammarMatcher`: where one answer stands in its grammar, and which tokens may come next.

Owns that place, the answer's tokens, from which it is found again where the lexer has failed, and the time that all of
it has taken. Knows neither scores nor sequences.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from llguidance import LLMatcher

from worker.grammar.errors import GrammarError
from worker.grammar.library import check_matcher, is_wrong_token
from worker.grammar.starts import GrammarStarts

#: Processor time that the masks of an answer, and its way on, may take: so much at first, and so much for each token.
#: What needs more would hold up everybody's step.
MASK_GRACE_S = 0.5
MASK_S_PER_TOKEN = 0.002


class GrammarMatcher:
    """The end of the answer is a token like others: an end token is allowed where, and only where, the text so far is
    whole. With `ignore_eos` only where nothing else can follow."""

    def __init__(
        self,
        starts: GrammarStarts,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        output_token_ids: Sequence[int] = (),
        *,
        ignore_eos: bool = False,
    ) -> None:
        """Raises GrammarError where `output_token_ids` do not follow the grammar."""
        self._starts = starts
        #: what its lexer is shared with; None: nobody
        self._root: LLMatcher | None = starts.root
        self._matcher = starts.root.deep_copy()
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._ignore_eos = ignore_eos
        self._words = np.zeros(-(-vocab_size // 32), dtype=np.int32)
        self._token_ids: list[int] = []
        self._spent_s = 0.0
        for token_id in output_token_ids:
            self.accept(token_id)

    @property
    def has_ended(self) -> bool:
        """Whether nothing, or an end token alone, can follow."""
        return self._matcher.is_stopped()

    def allowed(self) -> torch.Tensor:
        """bool [vocabulary], on the CPU: what may come next, at least one token. Raises GrammarError where the grammar
        asks too much of the library or of everybody's time."""
        self._ask(lambda matcher: matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes))
        if self._spent_s > MASK_GRACE_S + MASK_S_PER_TOKEN * len(self._token_ids):
            raise GrammarError("it takes too long to find the tokens that it allows")
        bits = np.unpackbits(self._words.view(np.uint8), count=self._vocab_size, bitorder="little")
        allowed = torch.from_numpy(bits.view(np.bool_))
        if self._ignore_eos:
            without_end = allowed.clone()
            without_end[self._eos_token_ids] = False
            if bool(without_end.any()):
                return without_end
        return allowed

    def accept(self, token_id: int) -> None:
        """The token that was chosen. Raises GrammarError for one that may not come next, and as `allowed`."""
        self._ask(lambda matcher: matcher.consume_token(token_id))
        self._token_ids.append(token_id)

    def _ask(self, ask: Callable[[LLMatcher], object]) -> None:
        """Of the library, and from a fresh start if the lexer has failed: for another answer, for what all of them
        together have asked of it, or for this one, which then fails by itself."""
        began_s = time.thread_time()
        ask(self._matcher)
        while self._matcher.is_error():
            self._start_anew()
            ask(self._matcher)
        self._spent_s += time.thread_time() - began_s

    def _start_anew(self) -> None:
        """With the tokens so far. Raises GrammarError where the lexer was this answer's own."""
        while self._matcher.is_error():
            if self._root is None:
                if is_wrong_token(self._matcher):
                    raise GrammarError(f"token {len(self._token_ids) + 1} of the answer does not follow it")
                check_matcher(self._matcher)  # raises
            elif self._starts.renew(self._root):
                self._root = None
                self._matcher = self._starts.alone()
            else:
                self._root = self._starts.root
                self._matcher = self._root.deep_copy()
            self._matcher.consume_tokens(self._token_ids)
