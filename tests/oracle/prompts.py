"""Prompts of token ids for the tiny models, which have no tokenizer."""

from collections.abc import Iterable
from random import Random

from tests.tiny_models import VOCAB_SIZE

#: ids below it are the special ones of the tiny models
FIRST_ORDINARY_ID = 3


def tiny_prompts(lengths: Iterable[int]) -> list[list[int]]:
    """Random ids; prompts of one call differ, and a prompt depends on its place and length alone."""
    prompts = []
    for place, length in enumerate(lengths):
        rng = Random(place * 10_000 + length)
        prompts.append([rng.randrange(FIRST_ORDINARY_ID, VOCAB_SIZE) for _ in range(length)])
    return prompts
