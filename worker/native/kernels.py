"""The compiled kernels as Python functions. Checks what they cannot: they read where they are told to."""

import ctypes
from pathlib import Path

import torch

from worker.native.structures import Attention, BestTokens, Buffers, Cache, Decoder, Selection, Step

#: dtypes that the kernels store numbers in, and their names in the library
DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
MAX_HEAD_SIZE = 256
#: vectors of 16 numbers: what sizes must be a multiple of
LANES = 16
#: outputs of a linear layer that are packed together
PANEL = 32
#: numbers that a thread is through sooner than it can rely on others: about 0.1 ms
NUM_LOGITS_OF_ONE_THREAD = 1 << 21


class Kernels:
    """Every call runs on `num_threads` threads, holds no Python lock and returns when it is done."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.scratch_floats.argtypes = [ctypes.c_int64] * 3
        self._library.scratch_floats.restype = ctypes.c_int64
        self._library.read_words.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
        self._library.read_words.restype = ctypes.c_int64
        self._library.find_best_tokens.argtypes = [ctypes.POINTER(BestTokens), ctypes.c_int]
        self._library.find_best_tokens.restype = None
        self._library.select_tokens_of_rows.argtypes = [ctypes.POINTER(Selection), ctypes.c_int]
        self._library.select_tokens_of_rows.restype = None
        for name in DTYPE_NAMES.values():
            step, attention = self._function("decoder_step", name), self._function("attention", name)
            step.argtypes = [*(ctypes.POINTER(kind) for kind in (Decoder, Step, Buffers)), ctypes.c_int]
            attention.argtypes = [ctypes.POINTER(Attention), ctypes.c_void_p, ctypes.c_int]
            store = self._function("store", name)
            store.argtypes = [ctypes.POINTER(Cache), *[ctypes.c_void_p] * 3, ctypes.c_int64]
            step.restype = ctypes.c_bool
            attention.restype = store.restype = None

    def scratch_floats(self, heads: int, kv_heads: int, head_size: int) -> int:
        """float32 numbers of working memory that each thread needs."""
        return self._library.scratch_floats(heads, kv_heads, head_size)

    def decoder_step(
        self, dtype: torch.dtype, decoder: Decoder, step: Step, buffers: Buffers, num_threads: int
    ) -> bool:
        """False, and nothing done, where a token has no embedding or its position no angle."""
        return self._function("decoder_step", DTYPE_NAMES[dtype])(decoder, step, buffers, num_threads)

    def attention(self, dtype: torch.dtype, attention: Attention, scratch: torch.Tensor, num_threads: int) -> None:
        self._function("attention", DTYPE_NAMES[dtype])(attention, scratch.data_ptr(), num_threads)

    def store(
        self, cache: Cache, keys: torch.Tensor, values: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Write keys and values [T, kv_heads, head_size], contiguous and of one dtype, to slots [T] of a layer."""
        assert keys.is_contiguous()
        assert values.is_contiguous()
        assert keys.dtype == values.dtype
        self._function("store", DTYPE_NAMES[keys.dtype])(
            cache, keys.data_ptr(), values.data_ptr(), slot_mapping.data_ptr(), len(slot_mapping)
        )

    def best_tokens(self, best: BestTokens, num_threads: int) -> None:
        is_short = best.num_rows * best.vocabulary <= NUM_LOGITS_OF_ONE_THREAD
        self._library.find_best_tokens(best, 1 if is_short else num_threads)

    def select_tokens(self, selection: Selection, num_threads: int) -> None:
        self._library.select_tokens_of_rows(selection, num_threads)

    def read_words(self, words: torch.Tensor, num_threads: int) -> int:
        """The sum of an int64 tensor: every byte is read once, by `num_threads` threads."""
        return self._library.read_words(words.data_ptr(), words.numel(), num_threads)

    def _function(self, verb: str, dtype_name: str) -> "ctypes._NamedFuncPointer":
        return getattr(self._library, f"{verb}_{dtype_name}")


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """[n, k] → panels [ceil(n / 32), words of k, 32, numbers of a word], as `matrix.h` reads them."""
    n, k = weight.shape
    per_word = 4 // weight.element_size()
    missing = -n % PANEL
    if missing:
        weight = torch.cat([weight, weight.new_zeros(missing, k)])
    return weight.view(-1, PANEL, k // per_word, per_word).transpose(1, 2).contiguous()


def interleave(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Rows of two tensors of equal shape, taken 16 and 16: one panel then holds outputs that belong together."""
    return torch.stack([gate.unflatten(0, (-1, LANES)), up.unflatten(0, (-1, LANES))], dim=1).flatten(0, 2)
