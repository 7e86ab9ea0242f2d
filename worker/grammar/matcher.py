"""`GrammarMatcher`: where one answer stands in its grammar, and which tokens may come next.

Owns that place and the time that its masks have taken. Knows neither scores nor sequences.
"""

import time
from collections.abc import Sequence

import numpy as np
import torch
from llguidance import LLMatcher

from worker.grammar.errors import GrammarError
from worker.grammar.library import check_matcher

#: Processor time that the masks of an answer may take: so much at first, and so much for each token. What needs more
#: would hold up everybody's step.
MASK_GRACE_S = 0.5
MASK_S_PER_TOKEN = 0.002


class GrammarMatcher:
    """The end of the answer is a token like others: an end token is allowed where, and only where, the text so far is
    whole. With `ignore_eos` only where nothing else can follow."""

    def __init__(
        self,
        matcher: LLMatcher,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        output_token_ids: Sequence[int] = (),
        *,
        ignore_eos: bool = False,
    ) -> None:
        """Raises GrammarError where `output_token_ids` do not follow the grammar."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._ignore_eos = ignore_eos
        self._words = np.zeros(-(-vocab_size // 32), dtype=np.int32)
        self._num_tokens = 0
        self._mask_s = 0.0
        for token_id in output_token_ids:
            self.accept(token_id)

    @property
    def has_ended(self) -> bool:
        """Whether nothing, or an end token alone, can follow."""
        return self._matcher.is_stopped()

    def allowed(self) -> torch.Tensor:
        """bool [vocabulary], on the CPU: what may come next, at least one token. Raises GrammarError where the grammar
        asks too much of the library or of everybody's time."""
        began_s = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        self._mask_s += time.thread_time() - began_s
        check_matcher(self._matcher)
        if self._mask_s > MASK_GRACE_S + MASK_S_PER_TOKEN * self._num_tokens:
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
        """The token that was chosen. Raises GrammarError for one that may not come next."""
        self._num_tokens += 1
        if not self._matcher.consume_token(token_id):
            raise GrammarError(f"token {self._num_tokens} of the answer does not follow it")
