"""The sampler on the device against the sampler on the CPU: the same logits give the same tokens."""

import random

import torch

from tests.gpu.parts import Bench, Case
from tests.gpu.report import Outcome, judged
from worker.sampler import Sampler, SampleRow
from worker.types import SamplingParams

#: of two scores so near to each other, either device's rounding may prefer one: the margin rule of the design
NEAR_TIE = 5e-4
NUM_ROWS = 128
#: log-probabilities are sums over the vocabulary, in another order on each device
LOGPROB_LIMIT = 1e-3
EOS = 2

KINDS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.9},
    "top-k, top-p, min-p": {"temperature": 1.1, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
    "top-p of a flat row": {"temperature": 3.0, "top_p": 0.999},
    "penalties, bias, min_tokens": {
        "temperature": 0.7,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
        "logit_bias": ((7, 5.0), (8, -100.0)),
        "min_tokens": 5,
    },
}


def cases(bench: Bench) -> list[Case]:
    rows = [Case(kind, lambda options=options: compare(bench, options)) for kind, options in KINDS.items()]
    return [*rows, Case("equal scores", lambda: ties(bench))]


def compare(bench: Bench, options: dict[str, object]) -> Outcome:
    vocab_size = bench.sizes.sampler_vocab
    logits = torch.randn(NUM_ROWS, vocab_size, generator=torch.Generator().manual_seed(1)) * 3
    numbers = random.Random(2)
    rows = [
        SampleRow(
            row,
            SamplingParams(64, seed=numbers.getrandbits(40), logprobs=3, **options),
            sample_index=row % 3,
            position=numbers.randrange(1, 30000),
            prompt_token_ids=[numbers.randrange(vocab_size) for _ in range(20)],
            output_token_ids=[numbers.randrange(vocab_size) for _ in range(row % 8)],
        )
        for row in range(NUM_ROWS)
    ]
    here, there = Sampler(vocab_size, [EOS], "cpu"), Sampler(vocab_size, [EOS], bench.device)
    wanted, got = here.sample(logits, rows), there.sample(logits.to(bench.device), rows)
    differing = [place for place in range(NUM_ROWS) if wanted[place].token_id != got[place].token_id]
    scores = here.decision_scores(logits, [rows[place] for place in differing]).topk(2).values if differing else None
    num_near = 0 if scores is None else int((scores[:, 0] - scores[:, 1] <= NEAR_TIE).sum())
    same = [place for place in range(NUM_ROWS) if place not in differing]
    off = max(abs(wanted[place].logprobs[0] - got[place].logprobs[0]) for place in same) if same else torch.inf
    text = f"{len(same)} of {NUM_ROWS} tokens equal, {num_near} near ties, log-probabilities off by {off:.0e}"
    is_right = len(differing) == num_near and off <= LOGPROB_LIMIT
    return judged(is_right, text, {"num_differing": len(differing), "num_near_ties": num_near, "logprobs_off": off})


def ties(bench: Bench) -> Outcome:
    """Equal scores go to the lowest token id, and a row without a number gets no token."""
    vocab_size = bench.sizes.sampler_vocab
    logits = torch.zeros(3, vocab_size)
    logits[0, [vocab_size - 1, vocab_size // 2, 11]] = 1.0
    logits[1, 5] = torch.nan
    logits[2] = -torch.inf
    rows = [SampleRow(row, SamplingParams(1, temperature=0.0), 0, 3, [], []) for row in range(3)]
    tokens = Sampler(vocab_size, [EOS], bench.device).sample(logits.to(bench.device), rows)
    token_ids = [token.token_id for token in tokens]
    return judged(token_ids == [11, -1, -1], f"tokens {token_ids}, wanted [11, -1, -1]", {})
