import pytest
import torch

from kv_cache.tensor_pool import TensorPool
from worker.attention import AttentionBatch, AttentionNotSupported, TorchSdpaBackend, choose_backend
from worker.attention.torch_sdpa import QUERY_BLOCK

HEADS, KV_HEADS, HEAD_SIZE = 6, 2, 16
SCALE = HEAD_SIZE**-0.5


def plain_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None) -> torch.Tensor:
    """One row written out: query [Q, H, D] are the last tokens of key, value [S, KVH, D]. In float64."""
    num_queries, num_keys = query.shape[0], key.shape[0]
    output = torch.empty_like(query, dtype=torch.float64)
    for head in range(query.shape[1]):
        kv_head = head // (query.shape[1] // key.shape[1])
        for index in range(num_queries):
            last = num_keys - num_queries + index
            first = 0 if window is None else max(0, last - window + 1)
            scores = key[first : last + 1, kv_head].double() @ query[index, head].double() * SCALE
            output[index, head] = scores.softmax(0) @ value[first : last + 1, kv_head].double()
    return output


class Rows:
    """Sequences whose earlier tokens are already in the pool, and a batch of their last `query_len` tokens."""

    def __init__(
        self,
        lengths: list[tuple[int, int]],
        block_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        garbage: float = 0.0,
    ) -> None:
        generator = torch.Generator().manual_seed(7)
        num_columns = [-(-context // block_size) for context, _ in lengths]
        self.pool = TensorPool(1, sum(num_columns) + 1, 0, block_size, KV_HEADS, HEAD_SIZE, dtype, "cpu")
        keys, values = self.pool.key_value(0)
        keys[1:], values[1:] = garbage, garbage
        ids = (torch.randperm(sum(num_columns), generator=generator) + 1).tolist()
        tables: list[list[int]] = []
        slots: list[int] = []
        started: list[int] = []
        self.rows = []
        for (context, query_len), columns in zip(lengths, num_columns, strict=True):
            table = [ids.pop() for _ in range(columns)]
            tables.append(table)
            query, key, value = (
                torch.randn(length, heads, HEAD_SIZE, generator=generator).to(dtype)
                for length, heads in ((query_len, HEADS), (context, KV_HEADS), (context, KV_HEADS))
            )
            self.rows.append((query, key, value))
            for position in range(context - query_len):
                if position % block_size == 0:
                    keys[table[position // block_size]], values[table[position // block_size]] = 0, 0
                keys[table[position // block_size], position % block_size] = key[position]
                values[table[position // block_size], position % block_size] = value[position]
            for position in range(context - query_len, context):
                slots.append(table[position // block_size] * block_size + position % block_size)
                if position % block_size == 0:
                    started.append(table[position // block_size])
        widest = max(num_columns)
        query_lens = [query_len for _, query_len in lengths]
        contexts = [context for context, _ in lengths]
        self.batch = AttentionBatch(
            slot_mapping=torch.tensor(slots),
            block_tables=torch.tensor([table + [0] * (widest - len(table)) for table in tables]),
            query_start_locs=torch.tensor([0, *query_lens]).cumsum(0),
            context_lens=torch.tensor(contexts),
            positions=torch.cat([torch.arange(context - query, context) for context, query in lengths]),
            query_lens=query_lens,
            row_context_lens=contexts,
            started_blocks=torch.tensor(started, dtype=torch.long),
        )

    def attend(self, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(what the backend computes, what it should)."""
        backend = TorchSdpaBackend(self.pool)
        backend.begin(self.batch)
        got = backend.forward(
            0,
            torch.cat([query for query, _, _ in self.rows]),
            torch.cat([key[-len(query) :] for query, key, _ in self.rows]),
            torch.cat([value[-len(query) :] for query, _, value in self.rows]),
            scale=SCALE,
            sliding_window=window,
        )
        want = torch.cat([plain_attention(query, key, value, window) for query, key, value in self.rows])
        return got, want


#: (context, query) lengths: decodes short and long, a whole prompt, chunks with a prefix, one ending on a block's edge
MIXED = [(1, 1), (70, 1), (16, 1), (33, 33), (40, 7), (9, 1), (64, 32), (17, 1), (2, 2)]


@pytest.mark.parametrize("block_size", [1, 3, 16, 256])
@pytest.mark.parametrize("window", [None, 1, 8, 64])
def test_mixed_rows_equal_attention_written_out(block_size: int, window: int | None) -> None:
    got, want = Rows(MIXED, block_size).attend(window)
    torch.testing.assert_close(got.double(), want, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 100])
def test_a_row_longer_than_one_block_of_queries_equals_attention_written_out(window: int | None) -> None:
    got, want = Rows([(QUERY_BLOCK + 60, QUERY_BLOCK + 21)], 16).attend(window)
    torch.testing.assert_close(got.double(), want, atol=2e-6, rtol=1e-5)


def test_bfloat16_stays_within_its_own_rounding() -> None:
    got, want = Rows(MIXED, 16, dtype=torch.bfloat16).attend(None)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), want, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("window", [None, 8])
def test_what_another_request_left_in_a_block_never_shows_even_if_it_is_nan(window: int | None) -> None:
    got, want = Rows(MIXED, 16, garbage=float("nan")).attend(window)
    torch.testing.assert_close(got.double(), want, atol=2e-6, rtol=1e-5)


def test_one_backend_serves_layers_with_and_without_a_window_in_one_step() -> None:
    rows = Rows(MIXED, 16)
    backend = TorchSdpaBackend(rows.pool)
    backend.begin(rows.batch)
    new = [torch.cat([part[-len(row[0]) :] for row in rows.rows for part in [row[index]]]) for index in range(3)]
    for window in (None, 8, None):
        got = backend.forward(0, *new, scale=SCALE, sliding_window=window)
        want = torch.cat([plain_attention(*row, window) for row in rows.rows])
        torch.testing.assert_close(got.double(), want, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("argument", [{"softcap": 50.0}, {"sinks": torch.zeros(HEADS)}])
def test_an_argument_that_is_not_implemented_is_an_error(argument: dict) -> None:
    rows = Rows([(4, 1)], 16)
    backend = TorchSdpaBackend(rows.pool)
    backend.begin(rows.batch)
    query, key, value = rows.rows[0]
    with pytest.raises(AttentionNotSupported, match="torch_sdpa"):
        backend.forward(0, query, key[-1:], value[-1:], scale=SCALE, **argument)


def test_auto_is_the_backend_that_runs_everywhere() -> None:
    assert choose_backend("auto") is choose_backend("torch_sdpa") is TorchSdpaBackend
