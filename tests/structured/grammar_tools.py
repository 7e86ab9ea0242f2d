"""Small helpers around grammars: a compiler for a tiny tokenizer, and random walks that a grammar allows."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

from tests.tiny_tokenizers import tokenizer_of
from worker.grammar.checks import GrammarLimits
from worker.grammar.compiler import CompiledGrammar, GrammarCompiler
from worker.grammar.vocabulary import vocabulary_of
from worker.text import Tokenizer

#: a limit that only a machine in trouble reaches
PATIENT = GrammarLimits(compile_s=1.0, wait_s=60.0)


@contextmanager
def compiler_of(tokenizer: Tokenizer, limits: GrammarLimits = PATIENT) -> Iterator[GrammarCompiler]:
    end = tokenizer.eos_token_id
    assert end is not None
    compiler = GrammarCompiler(lambda: vocabulary_of(tokenizer, tokenizer.vocab_size, [end]), limits)
    try:
        yield compiler
    finally:
        compiler.close()


def walk(compiled: CompiledGrammar, tokenizer: Tokenizer, seed: int, max_tokens: int = 2000) -> str | None:
    """The text of a random answer; None if it had not ended after so many tokens."""
    rng = random.Random(seed)
    matcher = compiled.matcher()
    token_ids: list[int] = []
    for _ in range(max_tokens):
        allowed = matcher.allowed().nonzero().squeeze(1).tolist()
        # An end is taken where there is one: most random texts would never come to theirs.
        token_id = tokenizer.eos_token_id if tokenizer.eos_token_id in allowed else rng.choice(allowed)
        matcher.accept(token_id)
        if token_id == tokenizer.eos_token_id:
            return tokenizer.decode(token_ids)
        token_ids.append(token_id)
    return None


def byte_level() -> Tokenizer:
    return tokenizer_of("byte_level")
