"""Token ids of one answer, as they come, to text. Knows neither stop strings nor how text is sent."""

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worker.text.tokenizer import Tokenizer

REPLACEMENT_CHARACTER = "\ufffd"

#: Text that ends in a replacement character may be half a character. UTF-8 characters have at most four bytes,
#: so more waiting tokens than this cannot be waiting for one.
_MAX_WAITING_TOKENS = 8


class Detokenizer:
    """Turns the ids of one answer into text piece by piece; the pieces add up to the text of all ids at once.

    Never half a character: bytes of an unfinished one are held until it is whole, or until it can no longer become
    whole; then each broken part is one U+FFFD. Total cost is linear in the number of ids.

    Byte-level vocabularies and the byte tokens of SentencePiece-like ones go through an incremental UTF-8
    decoder. What the other tokens add depends on their neighbours (spaces between words, the space before the
    first), so they are decoded beside the last id before them, and what that id gives by itself is cut off.
    """

    def __init__(self, tokenizer: "Tokenizer", skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped_ids = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._last_id: int | None = None
        self._waiting_ids: list[int] = []

    def push(self, token_ids: list[int]) -> str:
        """The text that is certain after these ids; "" while a character is unfinished."""
        kept_ids = [token_id for token_id in token_ids if token_id not in self._skipped_ids]
        if self._tokenizer.is_byte_level:
            return self._utf8.decode(b"".join(map(self._tokenizer.token_bytes, kept_ids)))
        pieces: list[str] = []
        for token_id in kept_ids:
            byte = self._tokenizer.fallback_byte(token_id)
            if byte is None:
                if self._tokenizer.has_token(token_id):  # one without would still count as a neighbour
                    self._waiting_ids.append(token_id)
            else:
                pieces.append(self._decode_waiting(is_last=True))
                pieces.append(self._decode_byte(token_id, byte))
                self._last_id = token_id
        if self._waiting_ids:
            pieces.append(self._decode_waiting(is_last=False))
        return "".join(pieces)

    def flush(self) -> str:
        """What was held back, at the end of the answer."""
        return self._decode_waiting(is_last=True) + self._utf8.decode(b"", final=True)

    def _decode_byte(self, token_id: int, byte: int) -> str:
        if self._last_id is None and byte < 0x80:
            return self._tokenizer.decode_piece(None, [token_id])  # the rule for the first space may apply
        return self._utf8.decode(bytes((byte,)))

    def _decode_waiting(self, *, is_last: bool) -> str:
        if not self._waiting_ids:
            return ""
        text = self._tokenizer.decode_piece(self._last_id, self._waiting_ids)
        is_unfinished = text.endswith(REPLACEMENT_CHARACTER) and len(self._waiting_ids) <= _MAX_WAITING_TOKENS
        if is_unfinished and not is_last:
            return ""
        self._last_id = self._waiting_ids[-1]
        self._waiting_ids = []
        return self._utf8.decode(b"", final=True) + text
