"""Gumbel noise that depends on (seed, sample index, absolute position, token id) and on nothing else.

Owns the hash and its mapping to Gumbel values. Knows neither logits nor requests. Because the noise is addressed
and not drawn from a stream, preemption, batch mates, chunking and a move to another worker leave it unchanged.

All mixing is integer arithmetic modulo 2**64 (exact on every device). 52 bits become a uniform in (0, 1), the two
logarithms are taken in float64 and the result is rounded once to float32, so that builds whose float64 logarithm
differs in the last place still agree on nearly every float32 value. The golden values in `tests/test_noise.py` fix
the function: to change it is to change every seeded answer.
"""

import math

import torch

_WORD = (1 << 64) - 1
#: odd multipliers with about as many ones as zeros
_SEED_STEP = 0xD8E893A36F23C45F
_SAMPLE_STEP = 0x9E2D09939D22CB6B
_POSITION_STEP = 0xC2790D27C59E92F5
_TOKEN_STEP = 0x9CE49D3AD0C88655
_FIRST_MULTIPLIER = 0xA5CA97641C5D211D
_SECOND_MULTIPLIER = 0xE21A13E77CA27D43
_FIRST_SHIFT, _SECOND_SHIFT, _LAST_SHIFT = 32, 29, 32
#: 52 bits plus one half is exact in float64, so the uniform is never 0 and never 1
_UNIFORM_BITS = 52
#: bits by which contenders are told from the rest: as many as float32 holds exactly
_CONTENDER_BITS = 24
#: far more than the float32 rounding of the test that they take
CONTENDER_MARGIN = 1.001
#: tokens within this of the best token's score are contenders too, so that a decision's margin can be read
CONTENDER_SLACK = 1.0


def _signed(word: int) -> int:
    """The int64 with the same 64 bits."""
    return word - (1 << 64) if word >> 63 else word


#: what a kernel needs to find contenders by itself: token step, multipliers, shifts, and the two numbers of bits
HASH_CONSTANTS = (
    _signed(_TOKEN_STEP),
    _signed(_FIRST_MULTIPLIER),
    _signed(_SECOND_MULTIPLIER),
    *(_FIRST_SHIFT, _SECOND_SHIFT, _LAST_SHIFT),
    *(_UNIFORM_BITS, _CONTENDER_BITS),
)


def _mix(word: int) -> int:
    word ^= word >> _FIRST_SHIFT
    word = word * _FIRST_MULTIPLIER & _WORD
    word ^= word >> _SECOND_SHIFT
    word = word * _SECOND_MULTIPLIER & _WORD
    return word ^ (word >> _LAST_SHIFT)


def row_key(seed: int, sample_index: int, position: int) -> int:
    """The key of one sampled token, as a signed 64-bit integer; any integers are allowed, taken modulo 2**64."""
    word = _mix((seed * _SEED_STEP + 1) & _WORD)
    word = _mix((word + sample_index * _SAMPLE_STEP) & _WORD)
    return _signed(_mix((word + position * _POSITION_STEP) & _WORD))


def token_hash(row_keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """int64 hashes of the broadcast of two int64 tensors; multiplication wraps, as int64 does in torch."""
    word = _unfinished_hash(row_keys, token_ids)
    word ^= _shift_right(word, _LAST_SHIFT)
    return word


def _unfinished_hash(row_keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """The hash but for its last step, which leaves the leading `_LAST_SHIFT` bits as they are."""
    word = token_ids * _signed(_TOKEN_STEP)
    word = word ^ row_keys
    for shift, multiplier in ((_FIRST_SHIFT, _FIRST_MULTIPLIER), (_SECOND_SHIFT, _SECOND_MULTIPLIER)):
        word ^= _shift_right(word, shift)
        word *= _signed(multiplier)
    return word


def gumbel(row_keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel values, float32, of the broadcast shape of `row_keys` and `token_ids` (both int64)."""
    bits = _shift_right(token_hash(row_keys, token_ids), 64 - _UNIFORM_BITS)
    uniform = bits.to(torch.float64).add_(0.5).mul_(2.0**-_UNIFORM_BITS)
    return uniform.log_().neg_().log_().neg_().to(torch.float32)


def contender_mask(scores: torch.Tensor, row_keys: torch.Tensor) -> torch.Tensor:
    """bool [rows, vocabulary]: a superset of the tokens that can win each row once noise is added to `scores`.

    Logarithms of the whole vocabulary cost most of a pass, and nearly no token has a chance. With u the uniform,
    noise is -log(-log u) <= -log(1 - u), so a token can reach the noisy score of the row's best one only where
    1 - u <= exp(its score - that noisy score): one float32 exponential and the leading bits of the hash tell.
    """
    best, best_ids = scores.max(dim=-1, keepdim=True)
    keys = row_keys.unsqueeze(1)
    bar = best + gumbel(keys, best_ids) - CONTENDER_SLACK
    token_ids = torch.arange(scores.shape[1], device=scores.device)
    leading = _shift_right(_unfinished_hash(keys, token_ids), 64 - _CONTENDER_BITS).to(torch.float32)
    largest = (1 << _CONTENDER_BITS) - 1
    reach = (scores - (bar - math.log((largest + 1) * CONTENDER_MARGIN))).exp_()
    mask = leading >= reach.neg_().add_(largest)
    return mask.scatter_(1, best_ids, True)


def _shift_right(word: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Logical shift: torch's own is arithmetic and drags the sign along."""
    return (word >> num_bits).bitwise_and_((1 << (64 - num_bits)) - 1)
