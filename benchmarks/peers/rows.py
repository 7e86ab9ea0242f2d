"""The rows of the comparison, their prompts, and the loop of a driver. Standard library alone: every peer imports it.

A driver loads its engine once and then answers lines on standard input, `ROW ROUND`, with one JSON line each, so that
several engines can be asked in turn while each stays loaded.
"""

import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

#: prompts of random ids from the middle of the vocabulary: special tokens stand at its ends
FIRST_TOKEN_ID = 1_000
LAST_TOKEN_ID = 40_000


@dataclass(frozen=True, slots=True)
class Row:
    """`counted`: the tokens of `tokens_per_s`, over the wall time from the first prompt to the last token."""

    num_requests: int
    num_input_tokens: int
    num_output_tokens: int
    counted: str

    @property
    def num_counted_tokens(self) -> int:
        per_request = {
            "output": self.num_output_tokens,
            "input": self.num_input_tokens,
            "all": self.num_input_tokens + self.num_output_tokens,
        }[self.counted]
        return self.num_requests * per_request


ROWS = {
    "decode_b1": Row(1, 128, 128, "output"),
    "decode_b8": Row(8, 128, 128, "output"),
    "decode_b32": Row(32, 128, 128, "output"),
    "prefill_2048": Row(1, 2048, 1, "input"),
    "mixed_64x512": Row(64, 512, 64, "all"),
}
#: what an engine must have room for
MAX_MODEL_LEN = max(row.num_input_tokens + row.num_output_tokens for row in ROWS.values()) + 1
MAX_NUM_SEQS = max(row.num_requests for row in ROWS.values())

#: (prompts, tokens of each answer) -> the number of tokens in each answer; greedy, and no token ends one early
Generate = Callable[[list[list[int]], int], list[int]]


def prompts_of(name: str, round_number: int) -> list[list[int]]:
    """New prompts in every round, the same for every engine: a prefix cache gains nothing."""
    row = ROWS[name]
    draw = random.Random(f"{name} {round_number}")
    ids = range(FIRST_TOKEN_ID, LAST_TOKEN_ID)
    return [draw.choices(ids, k=row.num_input_tokens) for _ in range(row.num_requests)]


def measure(name: str, round_number: int, generate: Generate) -> dict[str, object]:
    """Raises RuntimeError if an answer has another length than asked for."""
    row = ROWS[name]
    prompts = prompts_of(name, round_number)
    start_s = time.perf_counter()
    lengths = generate(prompts, row.num_output_tokens)
    seconds = time.perf_counter() - start_s
    if lengths != [row.num_output_tokens] * row.num_requests:
        raise RuntimeError(f"{name}: answers of {lengths} tokens instead of {row.num_output_tokens}")
    return {"row": name, "round": round_number, "seconds": seconds, "tokens_per_s": row.num_counted_tokens / seconds}


def serve(load: Callable[[list[str]], tuple[str, Generate]]) -> None:
    """`load(arguments)` returns the engine's name with its version, and how to generate with it."""
    # Libraries print where they like; the answers have a stream of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    start_s = time.perf_counter()
    name, generate = load(sys.argv[1:])
    generate(prompts_of("decode_b1", -1), 4)
    print(json.dumps({"engine": name, "start_s": time.perf_counter() - start_s}), file=answers, flush=True)
    for line in sys.stdin:
        row, round_number = line.split()
        print(json.dumps(measure(row, int(round_number), generate)), file=answers, flush=True)
