"""The C structures of `kernels.cpp`, `cache.h`, `key_tiles.h`, `best.h` and `selection.h`, field by field.

Sizes are int64, pointers are addresses.
"""

import ctypes
from collections.abc import Sequence


def _fields(pointers: str, sizes: str = "", floats: str = "") -> Sequence[tuple[str, type]]:
    return [
        *((name, ctypes.c_void_p) for name in pointers.split()),
        *((name, ctypes.c_int64) for name in sizes.split()),
        *((name, ctypes.c_float) for name in floats.split()),
    ]


class Linear(ctypes.Structure):
    _fields_ = _fields("weights bias", "n k")


class Layer(ctypes.Structure):
    _fields_ = (
        *_fields("input_norm post_attention_norm query_norm key_norm"),
        *((name, Linear) for name in ("qkv", "output", "gate_up", "down")),
        *_fields("keys values", "window"),
    )


class Decoder(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.POINTER(Layer)),
        *_fields("embedding final_norm"),
        ("head", Linear),
        *_fields("", "num_layers hidden intermediate heads kv_heads head_size block_size", "epsilon scale"),
    )


class Step(ctypes.Structure):
    _fields_ = _fields(
        "token_ids positions slots cosine sine tables query_starts context_lens logit_rows",
        "num_tokens num_rows table_width num_logit_rows num_positions",
    )


class Buffers(ctypes.Structure):
    _fields_ = _fields("residual qkv normed query attended activated scratch logits")


class Cache(ctypes.Structure):
    _fields_ = _fields("keys values", "block_size kv_heads head_size")


class Attention(ctypes.Structure):
    _fields_ = (
        ("cache", Cache),
        *_fields(
            "query output tables query_starts context_lens",
            "num_rows table_width heads window",
            "scale",
        ),
    )


class BestTokens(ctypes.Structure):
    _fields_ = _fields("logits rows tokens", "num_rows stride vocabulary no_token")


class Selection(ctypes.Structure):
    _fields_ = _fields(
        "rows temperatures keys cuts ids scores counts masses reaches",
        "num_rows vocabulary capacity token_step first_multiplier second_multiplier "
        "first_shift second_shift last_shift uniform_bits contender_bits",
        "reach slack margin",
    )
