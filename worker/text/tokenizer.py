"""The tokenizer of a model: text to ids, ids to text, and what a single id stands for.

Works on copies of the Rust tokenizer that are never changed after construction, so any number of threads may
encode at once (the wrapper in Transformers changes its own on each call). Knows no requests and no sampling.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer

from worker.text.chat import ChatTemplate, encode_text
from worker.text.detokenizer import Detokenizer


class TokenizerError(ValueError):
    """The model's folder holds no tokenizer that can be used here."""


@dataclass(frozen=True, slots=True)
class TokenPlace:
    """`start` counts characters of the text; it means nothing where the tokenizer added the token by itself."""

    start: int
    is_added: bool


class Tokenizer:
    """Immutable once built. `chat_template` is the text of a template that replaces the model's own."""

    def __init__(self, folder: Path, chat_template: str | None = None) -> None:
        try:
            wrapper = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, use_fast=True)
        except (ValueError, OSError, ImportError) as error:
            raise TokenizerError(f"{folder}: no tokenizer could be loaded: {error}") from error
        backend = getattr(wrapper, "backend_tokenizer", None)
        if not isinstance(backend, tokenizers.Tokenizer):
            kind = type(wrapper).__name__
            raise TokenizerError(f"{folder}: no tokenizer.json, and none could be built for a {kind}")
        special = set(wrapper.all_special_tokens)
        # By its size first: the vocabulary itself is long.
        is_short = backend.get_vocab_size(with_added_tokens=False) <= len(special)
        if is_short and backend.get_vocab(with_added_tokens=False).keys() <= special:
            # What Transformers makes where there is nothing to make one of.
            raise TokenizerError(f"{folder} holds no tokenizer")
        self._backend = copy.deepcopy(backend)
        self._backend.no_truncation()
        self._backend.no_padding()
        self.vocab_size = len(wrapper)
        self.eos_token_id: int | None = wrapper.eos_token_id
        self.bos_token_id: int | None = wrapper.bos_token_id
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        decoder = _decoder_steps(json.loads(self._backend.to_str())["decoder"])
        self.is_byte_level = decoder == ["ByteLevel"]
        self._bytes_of_chars = _bytes_of_byte_level_characters() if self.is_byte_level else {}
        self._fallback_bytes = self._find_fallback_bytes() if "ByteFallback" in decoder else {}
        #: whether texts are the bytes of their tokens one after the other, whatever comes before
        self.has_fixed_bytes = self.is_byte_level or bool(self._fallback_bytes)
        self._token_bytes: dict[int, bytes] = {}
        self._ordinary_id = next(
            (i for i in self._backend.encode("a", add_special_tokens=False).ids if i not in self.special_ids), None
        )
        self._chat = ChatTemplate(wrapper, self._backend, chat_template)

    @property
    def chat_template(self) -> str | None:
        return self._chat.text

    def token_id(self, token: str) -> int | None:
        """Of a token by its name in the vocabulary."""
        found: int | None = self._backend.token_to_id(token)
        return found

    @property
    def adds_special_tokens(self) -> bool:
        """Whether an empty prompt becomes at least one token (such as BOS)."""
        return bool(self.encode(""))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a completion prompt, with the special tokens that the tokenizer adds itself, such as BOS, unless not.

        The text of a control token inside the prompt becomes that control token: a completion prompt is the
        caller's whole input, written as the model reads it. Chat contents are treated otherwise.
        """
        return encode_text(self._backend, text, add_special_tokens=add_special_tokens)

    def encode_piece(self, text: str) -> list[int]:
        """Ids of a text by itself, without the special tokens that begin or end a prompt."""
        return encode_text(self._backend, text, add_special_tokens=False)

    def placed(self, text: str) -> list[TokenPlace]:
        """Where each token that `encode` makes of a text came from."""
        encoding = self._backend.encode_batch([text], add_special_tokens=True)[0]
        added = encoding.special_tokens_mask
        return [TokenPlace(start, bool(is_added)) for (start, _), is_added in zip(encoding.offsets, added, strict=True)]

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **template_options: Any
    ) -> list[int]:
        """Ids of a conversation, special tokens exactly as the chat template writes them (so one BOS, not two).

        The text of a control token inside a message stays plain text: nobody can forge a turn.
        Raises ChatTemplateError where the template refuses the messages or there is no template.
        """
        return self._chat.encode(messages, add_generation_prompt=add_generation_prompt, **template_options)

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of an answer, exactly as streaming it would have given it."""
        detokenizer = Detokenizer(self, skip_special_tokens)
        return detokenizer.push(token_ids) + detokenizer.flush()

    def decode_piece(self, last_id: int | None, token_ids: list[int]) -> str:
        """What `token_ids` add to a text whose last id is `last_id` (None: they begin the text)."""
        if last_id is None:
            return self._decode_all(token_ids)
        return self._decode_all([last_id, *token_ids])[len(self._decode_all([last_id])) :]

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """One token by itself, as log-probabilities name it: its text (U+FFFD where it is part of a character)
        and its exact bytes."""
        piece = self.token_bytes(token_id)
        return piece.decode("utf-8", "replace"), piece

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes that a token stands for inside a text; b"" for an id without a token."""
        piece = self._token_bytes.get(token_id)
        if piece is None:
            piece = self._token_bytes[token_id] = self._find_token_bytes(token_id)
        return piece

    def has_token(self, token_id: int) -> bool:
        """False for ids that a model has only because its vocabulary was rounded up."""
        return self._backend.id_to_token(token_id) is not None

    def fallback_byte(self, token_id: int) -> int | None:
        """The byte of a SentencePiece-like byte token such as <0xE2>; None for every other token."""
        return self._fallback_bytes.get(token_id)

    def _decode_all(self, token_ids: list[int]) -> str:
        text: str = self._backend.decode(token_ids, skip_special_tokens=False)
        return text

    def _find_token_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self.is_byte_level:
            mapped = [self._bytes_of_chars.get(char) for char in token]
            known = [byte for byte in mapped if byte is not None]
            return bytes(known) if len(known) == len(mapped) else token.encode()
        if token_id in self._fallback_bytes:
            return bytes((self._fallback_bytes[token_id],))
        return self.decode_piece(self._ordinary_id, [token_id]).encode()

    def _find_fallback_bytes(self) -> dict[int, int]:
        found = ((self._backend.token_to_id(f"<0x{byte:02X}>"), byte) for byte in range(256))
        return {token_id: byte for token_id, byte in found if token_id is not None}


def _decoder_steps(decoder: Mapping[str, Any] | None) -> list[str]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _decoder_steps(inner)]
    return [decoder["type"]]


def _bytes_of_byte_level_characters() -> dict[str, int]:
    """Byte-level vocabularies write each byte as a printable character: printable Latin-1 bytes as themselves, the
    others as the characters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
    assert set(table) == set(ByteLevel.alphabet())
    return table
