"""Our Triton kernels, on the CPU by Triton's interpreter (`tests/conftest.py`)."""

import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import Gemma2Config

from scheduler.outputs import ScheduledChunk, SchedulerOutputs
from tests.attention_rows import MIXED, Rows
from tests.tiny_models import VOCAB_SIZE, load_reference, save_tiny_model
from worker.attention import AttentionBatch, AttentionNotSupported, TorchSdpaBackend, TritonBackend
from worker.attention.triton_paged import MAX_SPLITS, MIN_SPLIT_KEYS, split_of
from worker.config import EngineConfig
from worker.loading import load_runner

NUM_RANDOM_BATCHES = 200


def attend(rows: Rows, window: int | None, softcap: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return rows.forward(rows.filled(TritonBackend), window, softcap), rows.wanted(window, softcap)


@pytest.mark.parametrize(("block_size", "window"), [(16, None), (48, 8), (256, 40)])
def test_mixed_rows_equal_attention_written_out(block_size: int, window: int | None) -> None:
    got, want = attend(Rows(MIXED, block_size), window)
    torch.testing.assert_close(got.double(), want, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("heads", "head_size"), [((5, 1), 80), ((1, 1), 8), ((20, 1), 16), ((4, 2), 256)])
def test_any_head_size_and_any_number_of_heads_may_share_keys(heads: tuple[int, int], head_size: int) -> None:
    got, want = attend(Rows([(40, 1), (37, 20)], 16, heads=heads, head_size=head_size), None)
    torch.testing.assert_close(got.double(), want, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_half_precision_stays_within_its_own_rounding(dtype: torch.dtype, tolerance: float) -> None:
    got, want = attend(Rows([(70, 1), (40, 7)], 16, dtype=dtype), None)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("window", [None, 150])
def test_long_rows_of_one_query_are_split_and_joined(window: int | None) -> None:
    rows = Rows([(MIN_SPLIT_KEYS * 3 + 5, 1), (3, 1)], 16, heads=(4, 2))
    backend = rows.filled(TritonBackend)
    got = rows.forward(backend, window)
    assert backend._parts is not None
    assert backend._parts[0].shape[2] > 1
    torch.testing.assert_close(got.double(), rows.wanted(window), atol=2e-6, rtol=1e-5)


def test_rows_are_split_only_as_far_as_programs_and_keys_allow() -> None:
    assert split_of(8, 10**6, 264) == min(264 // 8, MAX_SPLITS)
    assert split_of(64, 10**6, 264) == 4
    assert split_of(200, 10**6, 264) == 1
    assert split_of(8, 4 * MIN_SPLIT_KEYS, 264) == 4
    assert split_of(8, MIN_SPLIT_KEYS - 1, 264) == 1


def test_softcapped_logits_equal_attention_written_out() -> None:
    got, want = attend(Rows([(70, 1), (40, 7)], 16), 30, softcap=1.5)
    torch.testing.assert_close(got.double(), want, atol=5e-6, rtol=1e-5)
    uncapped = Rows([(70, 1), (40, 7)], 16).wanted(30)
    assert (want - uncapped).abs().max() > 1e-2


@pytest.mark.parametrize("window", [None, 8])
def test_what_another_request_left_in_a_block_never_shows_even_if_it_is_nan(window: int | None) -> None:
    clean, _ = attend(Rows(MIXED, 16), window)
    got, _ = attend(Rows(MIXED, 16, garbage=float("nan")), window)
    assert torch.equal(got, clean)


def test_keys_before_the_window_are_not_read() -> None:
    rows = Rows([(200, 1), (200, 20)], 16)
    backend = rows.filled(TritonBackend)
    for table, first_seen in zip(rows.batch.block_tables, (200 - 8, 180 - 7), strict=True):
        for cache in rows.pool.key_value(0):
            cache[table[: first_seen // 16]] = float("nan")
    torch.testing.assert_close(rows.forward(backend, 8).double(), rows.wanted(8), atol=2e-6, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # NumPy's, in the interpreter
def test_a_row_that_holds_nan_leaves_the_others_as_they_are() -> None:
    rows, broken = Rows(MIXED, 16), Rows(MIXED, 16)
    for part in broken.rows[3]:
        part[:] = float("nan")
    got, clean = attend(broken, None)[0], attend(rows, None)[0]
    lengths = [len(query) for query, _, _ in rows.rows]
    for index, (row, other) in enumerate(zip(got.split(lengths), clean.split(lengths), strict=True)):
        assert torch.equal(row, other) or (index == 3 and row.isnan().all())


def test_padding_rows_write_nothing_and_answer_zeros() -> None:
    rows = Rows([(20, 1), (300, 1)], 16, heads=(4, 2))
    alone = rows.forward(rows.filled(TritonBackend), None)
    padded = Rows([(20, 1), (300, 1)], 16, heads=(4, 2))
    backend = padded.filled(TritonBackend)
    batch, width = padded.batch, padded.batch.block_tables.shape[1]
    zeros = torch.zeros(2, dtype=torch.long)
    backend.begin(
        AttentionBatch(
            slot_mapping=torch.cat([batch.slot_mapping, zeros - 1]),
            block_tables=torch.cat([batch.block_tables, torch.zeros(2, width, dtype=torch.long)]),
            query_start_locs=torch.arange(5),
            context_lens=torch.cat([batch.context_lens, zeros]),
            positions=torch.cat([batch.positions, zeros]),
            query_lens=[1] * 4,
            row_context_lens=[20, 300, 0, 0],
            started_blocks=batch.started_blocks,
        )
    )
    junk = torch.full((2, 4, 16), 5.0)
    new = [
        torch.cat([*(row[part][-1:] for row in padded.rows), junk[:, :row_heads]])
        for part, row_heads in ((0, 4), (1, 2), (2, 2))
    ]
    got = backend.forward(0, *new, scale=padded.scale)
    assert (got[2:] == 0).all()
    torch.testing.assert_close(got[:2], alone, atol=2e-6, rtol=1e-5)
    for cache, other in zip(padded.pool.key_value(0), rows.pool.key_value(0), strict=True):
        assert torch.equal(cache, other)


def test_running_every_variant_at_first_changes_no_answer() -> None:
    rows = Rows([(70, 1), (40, 7), (300, 1)], 16)
    backend = rows.filled(TritonBackend)
    backend._runs_all_at_first = True
    for _ in range(2):
        torch.testing.assert_close(rows.forward(backend, None).double(), rows.wanted(None), atol=2e-6, rtol=1e-5)


def test_attention_sinks_are_refused() -> None:
    rows = Rows([(4, 1)], 16)
    query, key, value = rows.rows[0]
    with pytest.raises(AttentionNotSupported, match="triton"):
        rows.filled(TritonBackend).forward(0, query, key[-1:], value[-1:], scale=1.0, sinks=torch.zeros(6))


def test_a_model_that_caps_logits_equals_its_plain_forward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "initializer_range": 0.2,
    }
    folder = save_tiny_model(tmp_path, "gemma2", config=Gemma2Config(**sizes, sliding_window=24))
    options = EngineConfig(
        model=str(folder),
        dtype="float32",
        attention_backend="triton",
        max_model_len=128,
        max_num_batched_tokens=64,
        max_num_seqs=4,
    )
    loaded = load_runner(options)
    assert loaded.facts.attention_backend == "triton"
    assert "attention by triton" in capsys.readouterr().err
    token_ids = [random.Random(1).randrange(3, VOCAB_SIZE) for _ in range(50)]
    with torch.inference_mode():
        want = load_reference(folder)(torch.tensor([token_ids])).logits[0]
    table = [7, 3, 5, 2]
    for start, end in ((0, 30), (30, 49), (49, 50)):
        chunk = ScheduledChunk("r", 0, start, token_ids[start:end], table, is_prefill=True, do_sample=True)
        got = loaded.runner.execute(SchedulerOutputs(start, [chunk]))
        torch.testing.assert_close(got[0], want[end - 1], atol=5e-5, rtol=5e-5)


@pytest.mark.slow
def test_random_mixed_batches_equal_the_oracle() -> None:
    seen: Counter[object] = Counter()
    for seed in range(NUM_RANDOM_BATCHES):
        draw = random.Random(seed)
        dtype, tolerance = draw.choice([(torch.float16, 2e-3), (torch.float32, 1e-5)])
        block_size, head_size = draw.choice([16, 64, 256]), draw.choice([64, 80, 128, 256])
        kv_heads, group = draw.randrange(1, 3), draw.randrange(1, 9)
        window = draw.choice([None, draw.randrange(1, 100)])
        softcap = draw.choice([None, None, None, draw.uniform(1.0, 50.0)])
        lengths = []
        for _ in range(draw.randrange(1, 5)):
            context = draw.randrange(1, 120)
            lengths.append((context, draw.choice([1, 1, context, draw.randrange(1, context + 1)])))
        rows = Rows(
            lengths, block_size, dtype=dtype, heads=(kv_heads * group, kv_heads), head_size=head_size, seed=seed
        )
        got = rows.forward(rows.filled(TritonBackend), window, softcap)
        # The oracle does not cap logits.
        want = rows.wanted(window, softcap) if softcap else rows.forward(rows.filled(TorchSdpaBackend), window)
        torch.testing.assert_close(got.double(), want.double(), atol=tolerance, rtol=tolerance)
        seen.update(
            {
                dtype,
                ("block size", block_size),
                ("head size", head_size),
                ("group", group),
                ("window", window is not None),
                ("softcap", softcap is not None),
                ("single", any(query == 1 for _, query in lengths)),
                ("whole prompt", any(query == context > 1 for context, query in lengths)),
                ("chunk with a prefix", any(1 < query < context for context, query in lengths)),
                ("mixed", len({query == 1 for _, query in lengths}) == 2),
            }
        )
    kinds = [torch.float16, torch.float32]
    kinds += [("block size", size) for size in (16, 64, 256)] + [("head size", size) for size in (64, 80, 128, 256)]
    kinds += [("group", group) for group in range(1, 9)]
    kinds += [(name, True) for name in ("window", "softcap", "single", "whole prompt", "chunk with a prefix", "mixed")]
    assert min(seen[kind] for kind in kinds) >= 10, seen
