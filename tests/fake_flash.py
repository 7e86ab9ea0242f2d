"""What FlashAttention's paged functions promise, in plain PyTorch on any device: for what our backends give them.

Every demand that the real ones make of their arguments is an assertion here.
"""

from types import ModuleType

import torch

from tests.attention_rows import plain_attention

PAGE_TOKENS = 256


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    assert causal
    assert dropout_p == 0.0
    assert block_table is not None
    for locs in (cu_seqlens_q, cu_seqlens_k):
        assert (locs.dtype, locs.shape, int(locs[0])) == (torch.int32, (len(block_table) + 1,), 0)
    query_lens, key_lens = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    assert max(query_lens) <= max_seqlen_q
    assert max(key_lens) <= max_seqlen_k
    assert sum(query_lens) == len(q)
    answers = [
        _attend(row, *_paged(k, v, table, num_keys), softmax_scale, window_size, softcap)
        for row, table, num_keys in zip(q.split(query_lens), block_table, key_lens, strict=True)
    ]
    return torch.cat(answers)


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> torch.Tensor:
    assert causal
    assert k is v is None
    assert block_table is not None
    assert cache_seqlens is not None
    assert (cache_seqlens.dtype, len(cache_seqlens)) == (torch.int32, len(block_table))
    answers = [
        _attend(row, *_paged(k_cache, v_cache, table, num_keys), softmax_scale, window_size, softcap)
        for row, table, num_keys in zip(q, block_table, cache_seqlens.tolist(), strict=True)
    ]
    return torch.stack(answers)


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: object = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """PyTorch's: `torch.nn.attention.varlen`."""
    assert enable_gqa or query.shape[1] == key.shape[2]
    assert num_splits == 1, "splits leave rows unwritten"
    assert seqused_k is not None
    assert cu_seq_k is not None
    assert cu_seq_k.diff().tolist() == seqused_k.tolist()
    return flash_attn_varlen_func(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, 0.0, scale, True, window_size, 0.0, block_table
    )


def package() -> ModuleType:
    """As `import flash_attn` gives it."""
    module = ModuleType("flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    return module


def _paged(
    keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, num_keys: int
) -> tuple[torch.Tensor, torch.Tensor]:
    assert table.dtype == torch.int32
    assert keys.shape[1] % PAGE_TOKENS == 0
    key, value = (cache[table.long()].flatten(0, 1)[:num_keys] for cache in (keys, values))
    return key, value


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    window_size: tuple[int, int],
    softcap: float,
) -> torch.Tensor:
    assert query.dtype == key.dtype
    assert query.dtype in (torch.float16, torch.bfloat16)
    assert query.stride(-1) == key.stride(-1) == 1
    assert scale is not None
    left, right = window_size
    assert right in (-1, 0)  # causal
    if len(key) == 0:
        return torch.zeros_like(query)
    scaled = query.double() * (scale * query.shape[-1] ** 0.5)
    return plain_attention(scaled, key, value, None if left < 0 else left + 1, softcap or None).to(query.dtype)
