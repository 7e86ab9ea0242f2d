"""`try_walks`: short answers that a grammar allows, by chance, to meet what only shows once it is followed.

What lies behind choices that were not taken is not seen: where answers are made, that ends the one that meets it.
"""

import random
import time

from llguidance import LLMatcher

from worker.grammar.library import check_matcher

_NUM_WALKS = 4
_MAX_TOKENS = 24
#: for all walks: most grammars are through in a hundredth of it
_LIMIT_S = 0.2


def try_walks(matcher: LLMatcher) -> None:
    """`matcher` is at its start. Raises GrammarError where it fails."""
    rng = random.Random(0)
    end_s = time.monotonic() + _LIMIT_S
    for _ in range(_NUM_WALKS):
        if time.monotonic() > end_s:
            return
        walker = matcher.deep_copy()
        for _ in range(_MAX_TOKENS):
            mask = walker.compute_bitmask()
            check_matcher(walker)
            if walker.is_stopped() or time.monotonic() > end_s:
                break
            walker.consume_token(_any_of(mask, rng))
            check_matcher(walker)


def _any_of(mask: bytes, rng: random.Random) -> int:
    """A token of the mask, which has one: of the first byte with any, from somewhere on."""
    start = rng.randrange(len(mask))
    turned = mask[start:] + mask[:start]
    skipped = len(turned) - len(turned.lstrip(b"\0"))
    byte = turned[skipped]
    return (start + skipped) % len(mask) * 8 + rng.choice([bit for bit in range(8) if byte >> bit & 1])
