"""What the FlashAttention backends give to functions of that contract, on the CPU (`tests/fake_flash.py`)."""

import inspect
import sys
from types import ModuleType

import pytest
import torch
import torch.nn.attention.varlen

from tests import fake_flash
from tests.attention_rows import MIXED, Rows
from worker.attention import (
    AttentionBatch,
    AttentionNotSupported,
    FlashAttnBackend,
    TorchSdpaBackend,
    TorchVarlenBackend,
)
from worker.attention.slots import store_in_slots

Backend = type[FlashAttnBackend] | type[TorchVarlenBackend]
BACKENDS = [FlashAttnBackend, TorchVarlenBackend]
DECODES = [(1, 1), (70, 1), (300, 1), (256, 1)]
CHUNKS = [(33, 33), (300, 44), (513, 257)]


@pytest.fixture(autouse=True)
def flash(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = fake_flash.package()
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", fake_flash.varlen_attn)
    return module


@pytest.mark.parametrize("backend_type", BACKENDS)
@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize("lengths", [MIXED, DECODES, CHUNKS])
def test_rows_of_every_kind_equal_the_oracle(
    backend_type: Backend, window: int | None, lengths: list[tuple[int, int]]
) -> None:
    rows = Rows(lengths, 256, dtype=torch.float16)
    got = rows.forward(rows.filled(backend_type), window)
    want = rows.forward(rows.filled(TorchSdpaBackend), window)
    assert got.dtype == torch.float16
    torch.testing.assert_close(got, want, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("lengths", [MIXED, DECODES])
def test_flash_attn_caps_logits(lengths: list[tuple[int, int]]) -> None:
    rows = Rows(lengths, 512, dtype=torch.bfloat16)
    got = rows.forward(rows.filled(FlashAttnBackend), 50, softcap=2.0)
    torch.testing.assert_close(got.double(), rows.wanted(50, 2.0), atol=2e-2, rtol=2e-2)


def test_steps_of_single_queries_take_the_function_for_decoding(flash: ModuleType) -> None:
    taken = []
    for name in ("flash_attn_varlen_func", "flash_attn_with_kvcache"):
        function = getattr(flash, name)
        setattr(flash, name, lambda *a, _name=name, _function=function, **k: taken.append(_name) or _function(*a, **k))
    for lengths in (DECODES, MIXED, CHUNKS):
        rows = Rows(lengths, 256, dtype=torch.float16)
        rows.forward(rows.filled(FlashAttnBackend), None)
    assert taken == ["flash_attn_with_kvcache", "flash_attn_varlen_func", "flash_attn_varlen_func"]


def test_a_version_that_can_split_the_keys_of_mixed_rows_is_told_not_to(flash: ModuleType) -> None:
    given = []

    def of_that_version(*arguments: object, num_splits: int = 0, **others: object) -> torch.Tensor:
        given.append(num_splits)
        return fake_flash.flash_attn_varlen_func(*arguments, **others)

    flash.flash_attn_varlen_func = of_that_version
    rows = Rows(MIXED, 256, dtype=torch.float16)
    rows.forward(rows.filled(FlashAttnBackend), None)
    assert given == [1]


@pytest.mark.parametrize("backend_type", BACKENDS)
def test_padding_rows_write_nothing_and_answer_zeros(backend_type: Backend) -> None:
    rows = Rows([(20, 1)], 256, dtype=torch.float16)
    backend = rows.filled(backend_type)
    alone, kept = rows.forward(backend, None), [cache.clone() for cache in rows.pool.key_value(0)]
    batch, zero = rows.batch, torch.zeros(1, dtype=torch.long)
    backend.begin(
        AttentionBatch(
            slot_mapping=torch.cat([batch.slot_mapping, zero - 1]),
            block_tables=torch.cat([batch.block_tables, torch.zeros(1, batch.block_tables.shape[1], dtype=torch.long)]),
            query_start_locs=torch.arange(3),
            context_lens=torch.cat([batch.context_lens, zero]),
            positions=torch.cat([batch.positions, zero]),
            query_lens=[1, 1],
            row_context_lens=[20, 0],
            started_blocks=batch.started_blocks,
        )
    )
    query, key, value = rows.rows[0]
    new = [torch.cat([part[-1:], torch.full_like(part[-1:], torch.nan)]) for part in (query, key, value)]
    new[0] = new[0].nan_to_num()
    got = backend.forward(0, *new, scale=rows.scale)
    assert torch.equal(got, torch.cat([alone, torch.zeros_like(alone)]))
    for cache, before in zip(rows.pool.key_value(0), kept, strict=True):
        assert torch.equal(cache, before)


def test_stored_keys_and_values_are_in_their_slots_alone() -> None:
    keys, values = torch.zeros(3, 4, 2, 8), torch.zeros(3, 4, 2, 8)
    key, value = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    store_in_slots(keys, values, key, value, torch.tensor([9, -1, 6]))
    for cache, new in ((keys, key), (values, value)):
        flat = cache.flatten(0, 1)
        assert torch.equal(flat[[9, 6]], new[[0, 2]])
        assert flat.abs().sum(dim=(1, 2)).nonzero().flatten().tolist() == [6, 9]


@pytest.mark.parametrize(
    ("backend_type", "argument"),
    [
        (FlashAttnBackend, {"sinks": torch.zeros(6)}),
        (TorchVarlenBackend, {"sinks": torch.zeros(6)}),
        (TorchVarlenBackend, {"softcap": 50.0}),
    ],
)
def test_an_argument_that_is_not_implemented_is_an_error(backend_type: Backend, argument: dict) -> None:
    rows = Rows([(4, 1)], 256, dtype=torch.float16)
    query, key, value = rows.rows[0]
    with pytest.raises(AttentionNotSupported, match=backend_type.name):
        rows.filled(backend_type).forward(0, query, key[-1:], value[-1:], scale=1.0, **argument)


def test_the_imitation_takes_what_the_function_of_this_pytorch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    imitated = list(inspect.signature(fake_flash.varlen_attn).parameters)
    monkeypatch.undo()
    assert list(inspect.signature(torch.nn.attention.varlen.varlen_attn).parameters) == imitated
