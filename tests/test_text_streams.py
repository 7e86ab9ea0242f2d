"""Random texts of all scripts through the detokenizer, and random stop strings over its pieces, against plain
references."""

import random

import pytest
from transformers import AutoTokenizer

from deployments.answers import Answer, TextOptions
from tests.tiny_tokenizers import folder_of, tokenizer_of
from worker.text import Detokenizer, Tokenizer
from worker.types import TokenEvent

KINDS = ("byte_level", "sentencepiece_bpe", "wordpiece")
NUM_TEXTS = 1000
NUM_STOP_LISTS = 500
FIRST_SURROGATE, NUM_SURROGATES = 0xD800, 0x800
PIECES = (
    *("the cat", " sat on ", "hello, world.", "DEFGHIJ", " ", "  ", "\n", "\t", "a", "the"),
    *("😀", "👍🏽", "👨‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪", "1️⃣", "❤️"),
    *("你好", "日本語", "かな", "한국어", "𠮷", "，。"),
    *("שלום", "مرحبا", "\u200f", "\u202e", "ﷺ", "א1"),
    *("e\u0301", "a\u0308\u0323", "q\u0307\u0323\u0301", "สวัสดี", "हिन्दी", "க்ஷ", "Z\u0351\u036b\u0343"),
    *("\ufffd", "\ue000", "\u200d", "\ufe0f", "\u2028", "\U0010ffff", "\x00", "ß", "İ", "ﬁ"),
)


def random_text(draw: random.Random) -> str:
    pieces = [draw.choice(PIECES) for _ in range(draw.randrange(12))]
    for _ in range(draw.randrange(4)):
        code = draw.randrange(0x11000 - NUM_SURROGATES)
        code += NUM_SURROGATES if code >= FIRST_SURROGATE else 0
        pieces.insert(draw.randrange(len(pieces) + 1), chr(code))
    return "".join(pieces)


def streamed(tokenizer: Tokenizer, token_ids: list[int], draw: random.Random) -> str:
    detokenizer = Detokenizer(tokenizer)
    pieces = []
    start = 0
    while start < len(token_ids):
        end = start + draw.choice([1, 1, 1, 2, 5])
        pieces.append(detokenizer.push(token_ids[start:end]))
        start = end
    return "".join(pieces) + detokenizer.flush()


@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_random_texts_stream_as_they_decode_at_once(kind: str) -> None:
    draw = random.Random(kind)
    tokenizer = tokenizer_of(kind)
    library = AutoTokenizer.from_pretrained(str(folder_of(kind))).backend_tokenizer
    for _ in range(NUM_TEXTS):
        text = random_text(draw)
        token_ids = tokenizer.encode(text)
        found = streamed(tokenizer, token_ids, draw)
        assert found == library.decode(token_ids, skip_special_tokens=True), repr(text)
        if kind == "byte_level":
            assert found == text


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece_bpe"])
def test_lone_bytes_between_random_texts_stay_single_replacement_characters(kind: str) -> None:
    draw = random.Random(kind)
    tokenizer = tokenizer_of(kind)
    byte_ids = [i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1]
    lone = [i for i in byte_ids if tokenizer.token_bytes(i)[0] >= 0x80]
    assert len(lone) == 128
    for _ in range(NUM_TEXTS):
        token_ids = [i for i in tokenizer.encode(random_text(draw)) if i not in tokenizer.special_ids]
        for _ in range(draw.randrange(1, 4)):
            token_ids.insert(draw.randrange(len(token_ids) + 1), draw.choice(lone))
        found = streamed(tokenizer, token_ids, draw)
        expected = b"".join(map(tokenizer.token_bytes, token_ids)).decode("utf-8", "replace")
        if kind == "sentencepiece_bpe" and tokenizer.fallback_byte(token_ids[0]) is None:
            expected = expected.removeprefix(" ")  # the one that the tokenizer puts before a text
        assert found == expected


def random_stops(draw: random.Random, text: str) -> list[str]:
    """Parts of the text, whole or with one more character that may not follow, and strings from anywhere."""
    stops = []
    for _ in range(draw.randrange(1, 6)):
        start = draw.randrange(len(text) + 1)
        stop = text[start : start + draw.choice([1, 1, 2, 3, 8, 30])]
        if draw.random() < 0.6:
            stop += draw.choice(PIECES)[:1]
        stops.append(stop or draw.choice(PIECES))
    return stops


def reference(text: str, stops: list[str], include: bool) -> tuple[str, int | None]:
    """The text that a client gets, and where the stop string ends in the whole text (None: there is none)."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end if include else end - max(map(len, ended))], end
    return text, None


@pytest.mark.parametrize("kind", KINDS)
def test_five_hundred_random_stop_lists_cut_where_a_plain_search_does(kind: str) -> None:
    draw = random.Random(f"stops {kind}")
    tokenizer = tokenizer_of(kind)
    num_stopped = 0
    for _ in range(NUM_STOP_LISTS):
        token_ids = [i for i in tokenizer.encode(random_text(draw) + "the cat") if i not in tokenizer.special_ids]
        text = tokenizer.decode(token_ids)
        stops, include = random_stops(draw, text), draw.random() < 0.3
        expected, end = reference(text, stops, include)
        num_stopped += end is not None
        answer = Answer(0, tokenizer, TextOptions(tuple(stops), include))
        sent, detokenizer, arrived = "", Detokenizer(tokenizer), ""
        for place, token_id in enumerate(token_ids):
            finish_reason = "length" if place == len(token_ids) - 1 else None
            delta = answer.push(TokenEvent("a", 0, [token_id], finish_reason=finish_reason))
            arrived += detokenizer.push([token_id]) + (detokenizer.flush() if finish_reason else "")
            sent += delta.text if delta is not None else ""
            assert expected.startswith(sent), "a part of a stop string has left"
            held = arrived[len(sent) :]
            if answer.finish_reason is not None:
                break
            assert not held or any(stop.startswith(held) for stop in stops), "text is held that begins no stop string"
        assert (sent, answer.finish_reason) == (expected, "length" if end is None else "stop")
        if end is not None:
            # Usage ends with the token that completed the string.
            assert answer.num_tokens == place + 1
            assert len(arrived) >= end
    assert NUM_STOP_LISTS / 4 < num_stopped < NUM_STOP_LISTS * 3 / 4
