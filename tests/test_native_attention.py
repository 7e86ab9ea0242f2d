"""Our CPU kernel for paged attention against attention written out, over shapes that the decoders do not reach."""

import random

import pytest
import torch

from tests.attention_rows import MIXED, Rows, plain_attention
from worker.attention import AttentionNotSupported, CpuNativeBackend


def attend(rows: Rows, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    return rows.attend(CpuNativeBackend, window)


@pytest.mark.parametrize("block_size", [1, 3, 16, 256])
@pytest.mark.parametrize("window", [None, 1, 8, 64])
def test_mixed_rows_equal_attention_written_out(block_size: int, window: int | None) -> None:
    got, want = attend(Rows(MIXED, block_size), window)
    torch.testing.assert_close(got.double(), want, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (2, 1), (6, 2), (8, 2), (5, 1), (6, 1), (7, 1), (8, 1)])
def test_any_number_of_heads_may_share_keys(heads: int, kv_heads: int) -> None:
    rows = Rows([(130, 1), (150, 70), (64, 64)], 16, heads=(heads, kv_heads), head_size=64)
    got, want = attend(rows, None)
    torch.testing.assert_close(got.double(), want, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("head_size", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.bfloat16, 2e-2)])
def test_head_sizes_of_known_models(head_size: int, dtype: torch.dtype, tolerance: float) -> None:
    got, want = attend(Rows([(65, 1), (90, 41)], 16, dtype=dtype, heads=(4, 2), head_size=head_size), None)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_another_request_left_in_a_block_never_shows_even_if_it_is_nan(
    window: int | None, dtype: torch.dtype
) -> None:
    clean, _ = attend(Rows(MIXED, 16, dtype=dtype), window)
    got, _ = attend(Rows(MIXED, 16, dtype=dtype, garbage=float("nan")), window)
    assert torch.equal(got, clean)


def test_keys_before_the_window_are_not_read() -> None:
    rows = Rows([(200, 1), (200, 20)], 16)
    backend = rows.backend(CpuNativeBackend)
    for table, first_seen in zip(rows.batch.block_tables, (200 - 8, 180 - 7), strict=True):
        for cache in rows.pool.key_value(0):
            cache[table[: first_seen // 16]] = float("nan")
    torch.testing.assert_close(rows.forward(backend, 8).double(), rows.wanted(8), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_random_mixed_batches_equal_attention_written_out(seed: int) -> None:
    draw = random.Random(seed)
    lengths = []
    for _ in range(12):
        context = draw.randrange(1, 200)
        lengths.append((context, draw.choice([1, 1, context, draw.randrange(1, context + 1)])))
    window = draw.choice([None, draw.randrange(1, 100)])
    got, want = attend(Rows(lengths, draw.choice([1, 7, 8, 16, 32, 48])), window)
    torch.testing.assert_close(got.double(), want, atol=2e-6, rtol=1e-5)


def test_scores_far_apart_do_not_overflow() -> None:
    rows = Rows([(100, 1), (100, 50)], 16)
    got, want = attend(rows, None)
    huge, huge_want = Rows([(100, 1), (100, 50)], 16), []
    for query, key, value in huge.rows:
        query *= 1000
        huge_want.append(plain_attention(query, key, value, None))
    sharp, _ = attend(huge, None)
    assert torch.isfinite(sharp).all()
    torch.testing.assert_close(sharp.double(), torch.cat(huge_want), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(got.double(), want, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("argument", [{"softcap": 50.0}, {"sinks": torch.zeros(6)}])
def test_an_argument_that_is_not_implemented_is_an_error(argument: dict) -> None:
    rows = Rows([(4, 1)], 16)
    backend = rows.backend(CpuNativeBackend)
    query, key, value = rows.rows[0]
    with pytest.raises(AttentionNotSupported, match="cpu_native"):
        backend.forward(0, query, key[-1:], value[-1:], scale=1.0, **argument)
