"""Keys of cache blocks: a keyed hash chain over (parent, tokens), rooted in adapter and salt.

Two blocks have one key only if everything before them is the same too. The secret keeps others from computing keys;
requests with different salts share nothing.
"""

from array import array
from hashlib import blake2b

from kv_cache import BlockKey

KEY_BYTES = 16


class PrefixKeys:
    """Makes keys for blocks of `block_size` tokens."""

    def __init__(self, secret: bytes, block_size: int) -> None:
        # The hash takes at most 64 bytes as its key.
        self._secret = blake2b(secret).digest()
        self.block_size = block_size

    def root(self, salt: str = "", adapter: str = "") -> BlockKey:
        """The parent of a prompt's first block."""
        text = f"{len(adapter)}:{adapter}{salt}".encode()
        return blake2b(text, digest_size=KEY_BYTES, key=self._secret).digest()

    def extend(self, parent: BlockKey, token_ids: list[int]) -> list[BlockKey]:
        """Keys of the full blocks of `token_ids`, the first of which follows the block `parent`."""
        keys: list[BlockKey] = []
        size = self.block_size
        for start in range(0, len(token_ids) - size + 1, size):
            tokens = array("q", token_ids[start : start + size]).tobytes()
            parent = blake2b(parent + tokens, digest_size=KEY_BYTES, key=self._secret).digest()
            keys.append(parent)
        return keys
