import pytest
import torch

from tests.attention_rows import MIXED, Rows, plain_attention
from worker.attention import AttentionNotSupported, TorchSdpaBackend
from worker.attention.torch_sdpa import QUERY_BLOCK


@pytest.mark.parametrize("block_size", [1, 3, 16, 256])
@pytest.mark.parametrize("window", [None, 1, 8, 64])
def test_mixed_rows_equal_attention_written_out(block_size: int, window: int | None) -> None:
    got, want = Rows(MIXED, block_size).attend(TorchSdpaBackend, window)
    torch.testing.assert_close(got.double(), want, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 100])
def test_a_row_longer_than_one_block_of_queries_equals_attention_written_out(window: int | None) -> None:
    got, want = Rows([(QUERY_BLOCK + 60, QUERY_BLOCK + 21)], 16).attend(TorchSdpaBackend, window)
    torch.testing.assert_close(got.double(), want, atol=2e-6, rtol=1e-5)


def test_bfloat16_stays_within_its_own_rounding() -> None:
    got, want = Rows(MIXED, 16, dtype=torch.bfloat16).attend(TorchSdpaBackend, None)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), want, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("window", [None, 8])
def test_what_another_request_left_in_a_block_never_shows_even_if_it_is_nan(window: int | None) -> None:
    got, want = Rows(MIXED, 16, garbage=float("nan")).attend(TorchSdpaBackend, window)
    torch.testing.assert_close(got.double(), want, atol=2e-6, rtol=1e-5)


def test_one_backend_serves_layers_with_and_without_a_window_in_one_step() -> None:
    rows = Rows(MIXED, 16)
    backend = rows.backend(TorchSdpaBackend)
    new = [torch.cat([part[-len(row[0]) :] for row in rows.rows for part in [row[index]]]) for index in range(3)]
    for window in (None, 8, None):
        got = backend.forward(0, *new, scale=rows.scale, sliding_window=window)
        want = torch.cat([plain_attention(*row, window) for row in rows.rows])
        torch.testing.assert_close(got.double(), want, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("argument", [{"softcap": 50.0}, {"sinks": torch.zeros(6)}])
def test_an_argument_that_is_not_implemented_is_an_error(argument: dict) -> None:
    rows = Rows([(4, 1)], 16)
    backend = rows.backend(TorchSdpaBackend)
    query, key, value = rows.rows[0]
    with pytest.raises(AttentionNotSupported, match="torch_sdpa"):
        backend.forward(0, query, key[-1:], value[-1:], scale=rows.scale, **argument)
