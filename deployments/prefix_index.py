"""`PrefixIndex`: the prompt blocks that one replica is believed to have in its cache.

An approximation, made of what was sent there and corrected by what came back. Knows block keys, not tokens. A replica
that evicts by other rules than these only costs hits, never a wrong answer.
"""

from bisect import bisect_left
from collections import OrderedDict
from dataclasses import dataclass, field

from kv_cache import BlockKey

#: until the replica has said how many blocks it has
FIRST_CAPACITY = 4096


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """Keys of a prompt's full blocks, from its beginning; none where nothing is cached."""

    keys: list[BlockKey] = field(default_factory=list)
    block_size: int = 1


class PrefixIndex:
    """Least recently used first. Of one prompt the last block goes before the first, as in the workers' own cache, so
    that what is held of a prompt is one piece from its beginning."""

    def __init__(self) -> None:
        self.capacity = FIRST_CAPACITY
        #: key -> whether the replica has computed it, as far as is known
        self._keys: OrderedDict[BlockKey, bool] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def num_held(self, keys: list[BlockKey]) -> int:
        """How many of a prompt's blocks, from its beginning, are there or are on their way."""
        return bisect_left(keys, True, key=lambda key: key not in self._keys)

    def num_computed(self, keys: list[BlockKey]) -> int:
        """The same without those that a request is only about to compute."""
        return bisect_left(keys, True, key=lambda key: not self._keys.get(key, False))

    def send(self, keys: list[BlockKey]) -> None:
        """A request with this prompt goes to the replica."""
        for key in reversed(keys):
            self._keys.setdefault(key, False)
            self._keys.move_to_end(key)
        self._shrink(self.capacity)

    def confirm(self, keys: list[BlockKey], num_expected: int, num_found: int) -> None:
        """The request with this prompt has its first token: its blocks are there. Of `num_expected` that should have
        been there before only `num_found` were: as many more of the oldest are taken to be gone as well."""
        for key in reversed(keys):
            self._keys[key] = True
            self._keys.move_to_end(key)
        self._shrink(min(self.capacity, len(self._keys) - max(num_expected - num_found, 0)))

    def _shrink(self, num_keys: int) -> None:
        while len(self._keys) > num_keys:
            self._keys.popitem(last=False)
