import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import CohereConfig, Gemma3TextConfig, GraniteConfig, NemotronConfig

from scheduler.outputs import PENDING_TOKEN_ID, ScheduledChunk, SchedulerOutputs
from tests.tiny_models import FAMILIES, SLIDING_WINDOW, VOCAB_SIZE, load_reference, save_tiny_model, tiny_config
from worker.config import EngineConfig
from worker.loading import LoadedModel, load_runner
from worker.model_support import UnsupportedModelError

TOLERANCE = 5e-5


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: save_tiny_model(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


def load(folder: Path, **options: object) -> LoadedModel:
    options = {"max_model_len": 512, "max_num_batched_tokens": 512, "max_num_seqs": 16, **options}
    return load_runner(EngineConfig(model=str(folder), dtype="float32", **options))


def prompt(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, VOCAB_SIZE) for _ in range(length)]


@dataclass
class Row:
    """A sequence being fed: its known tokens, the reference's logits for each, its blocks."""

    token_ids: list[int]
    want: torch.Tensor
    block_table: list[int]
    start: int = 0

    def next_chunk(self, size: int) -> ScheduledChunk:
        token_ids = self.token_ids[self.start : self.start + size]
        chunk = ScheduledChunk("r", 0, self.start, token_ids, self.block_table, is_prefill=True, do_sample=True)
        self.start += len(token_ids)
        return chunk


def make_rows(folder: Path, lengths: list[int], block_size: int) -> list[Row]:
    model = load_reference(folder)
    next_block = 1
    rows = []
    with torch.inference_mode():
        for seed, length in enumerate(lengths):
            token_ids = prompt(length, seed)
            num_blocks = -(-length // block_size)
            table = list(range(next_block, next_block + num_blocks))
            random.Random(seed).shuffle(table)
            next_block += num_blocks
            rows.append(Row(token_ids, model(torch.tensor([token_ids])).logits[0], table))
    return rows


def assert_equals_reference(got: torch.Tensor, rows: list[Row]) -> None:
    want = torch.stack([row.want[row.start - 1] for row in rows])
    assert got.dtype == torch.float32
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=TOLERANCE)
    assert torch.equal(got.argmax(-1), want.argmax(-1))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("block_size", [1, 16, 256])
def test_any_chunks_in_mixed_batches_equal_one_plain_forward(
    checkpoints: dict[str, Path], family: str, block_size: int
) -> None:
    lengths = [SLIDING_WINDOW * 3, 5, 97, 33]
    loaded = load(checkpoints[family], block_size=block_size, num_device_blocks=max(600 // block_size, 8) + 512)
    rows = make_rows(checkpoints[family], lengths, block_size)
    draw = random.Random(block_size)
    step = 0
    while unfinished := [row for row in rows if row.start < len(row.token_ids)]:
        step += 1
        scheduled = [row for row in unfinished if row is unfinished[0] or draw.random() < 0.7]
        chunks = [row.next_chunk(draw.choice([1, 1, 2, 16, 31, 64])) for row in scheduled]
        assert_equals_reference(loaded.runner.execute(SchedulerOutputs(step, chunks)), scheduled)


@pytest.mark.parametrize("attention_backend", ["auto", "torch_sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_any_rows_of_the_last_step_equal_one_plain_forward(
    checkpoints: dict[str, Path], family: str, attention_backend: str
) -> None:
    loaded = load(checkpoints[family], num_device_blocks=80, attention_backend=attention_backend)
    rows = make_rows(checkpoints[family], [60, 40], 16)
    loaded.runner.execute(SchedulerOutputs(1, [rows[0].next_chunk(30)]))
    sampled = loaded.runner.execute(SchedulerOutputs(2, [rows[0].next_chunk(20), rows[1].next_chunk(40)]))
    kept = sampled.clone()
    for places in ([19, 59], [0], list(range(60)), [33, 2, 33]):
        want = [rows[0].want[30 + place] if place < 20 else rows[1].want[place - 20] for place in places]
        got = loaded.runner.logits_of(places)
        torch.testing.assert_close(got, torch.stack(want), atol=TOLERANCE, rtol=TOLERANCE)
    assert torch.equal(sampled, kept), "what the step returned has changed"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sequence_swapped_out_and_in_to_other_blocks_goes_on_unchanged(
    checkpoints: dict[str, Path], family: str
) -> None:
    loaded = load(checkpoints[family], num_device_blocks=80, num_host_blocks=20)
    moved, stays = rows = make_rows(checkpoints[family], [150, 90], 16)
    loaded.runner.execute(SchedulerOutputs(1, [moved.next_chunk(100), stays.next_chunk(30)]))
    used = moved.block_table[:7]
    out_pairs = list(zip(used, range(12, 5, -1), strict=True))
    loaded.tensor_pool.swap(out_pairs, [], [])
    for layer in range(loaded.tensor_pool.num_layers):
        for cache in loaded.tensor_pool.key_value(layer):
            cache[used] = float("nan")
    assert_equals_reference(loaded.runner.execute(SchedulerOutputs(2, [stays.next_chunk(1)])), [stays])
    moved.block_table = list(range(40, 50))
    in_pairs = [(host, device) for (_, host), device in zip(out_pairs, moved.block_table, strict=False)]
    loaded.tensor_pool.swap([], in_pairs, [])
    got = loaded.runner.execute(SchedulerOutputs(3, [moved.next_chunk(1), stays.next_chunk(20)]))
    assert_equals_reference(got, rows)


def test_a_forked_row_reads_the_shared_blocks_and_its_own_copy_of_the_last(checkpoints: dict[str, Path]) -> None:
    loaded = load(checkpoints["llama"], num_device_blocks=80)
    parent, _ = make_rows(checkpoints["llama"], [60, 5], 16)
    loaded.runner.execute(SchedulerOutputs(1, [parent.next_chunk(40)]))
    loaded.tensor_pool.swap([], [], [(parent.block_table[2], 70)])
    child = Row(parent.token_ids, parent.want, [*parent.block_table[:2], 70, 71], parent.start)
    got = loaded.runner.execute(SchedulerOutputs(2, [parent.next_chunk(10), child.next_chunk(3)]))
    assert_equals_reference(got, [parent, child])


def test_only_rows_that_sample_get_logits_in_the_order_of_their_chunks(checkpoints: dict[str, Path]) -> None:
    loaded = load(checkpoints["llama"], num_device_blocks=80)
    rows = make_rows(checkpoints["llama"], [20, 30, 10], 16)
    chunks = [row.next_chunk(size) for row, size in zip(rows, (12, 1, 10), strict=True)]
    chunks[1].do_sample = False
    assert_equals_reference(loaded.runner.execute(SchedulerOutputs(1, chunks)), [rows[0], rows[2]])


def test_a_step_in_which_no_row_samples_still_fills_the_cache(checkpoints: dict[str, Path]) -> None:
    loaded = load(checkpoints["gpt_neox"], num_device_blocks=80)
    (row,) = make_rows(checkpoints["gpt_neox"], [40], 16)
    chunk = row.next_chunk(25)
    chunk.do_sample = False
    assert loaded.runner.execute(SchedulerOutputs(1, [chunk])).shape == (0, VOCAB_SIZE)
    assert_equals_reference(loaded.runner.execute(SchedulerOutputs(2, [row.next_chunk(15)])), [row])


def test_a_step_without_chunks_gives_no_logits(checkpoints: dict[str, Path]) -> None:
    loaded = load(checkpoints["llama"], num_device_blocks=80)
    assert loaded.runner.execute(SchedulerOutputs(1)).shape == (0, VOCAB_SIZE)


def test_a_token_that_is_not_known_yet_is_never_embedded(checkpoints: dict[str, Path]) -> None:
    loaded = load(checkpoints["llama"], num_device_blocks=80)
    chunk = ScheduledChunk("r", 0, 0, [PENDING_TOKEN_ID], [1], is_prefill=False, do_sample=True)
    with pytest.raises(AssertionError, match="not known"):
        loaded.runner.execute(SchedulerOutputs(1, [chunk]))


def test_the_null_block_stays_zero(checkpoints: dict[str, Path]) -> None:
    loaded = load(checkpoints["qwen2"], num_device_blocks=80)
    rows = make_rows(checkpoints["qwen2"], [50, 3], 16)
    loaded.runner.execute(SchedulerOutputs(1, [row.next_chunk(60) for row in rows]))
    for layer in range(loaded.tensor_pool.num_layers):
        for cache in loaded.tensor_pool.key_value(layer):
            assert not cache[0].any()
            assert cache[1].any()


_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}


@pytest.mark.parametrize(
    "config",
    [
        CohereConfig(**_SIZES, logit_scale=0.3),
        GraniteConfig(**_SIZES, logits_scaling=3.0, attention_multiplier=0.3),
        Gemma3TextConfig(**_SIZES, head_dim=16, sliding_window=24, final_logit_softcapping=5.0),
    ],
    ids=["cohere_scales_logits", "granite_divides_logits", "gemma3_caps_logits_and_mixes_windows"],
)
def test_what_a_family_does_to_its_logits_is_done(tmp_path: Path, config: object) -> None:
    folder = save_tiny_model(tmp_path, "", config=config)
    loaded = load(folder, num_device_blocks=80)
    (row,) = make_rows(folder, [120], 16)
    for size in (60, 1, 40, 1, 18):
        assert_equals_reference(loaded.runner.execute(SchedulerOutputs(1, [row.next_chunk(size)])), [row])


def test_a_family_that_keeps_arguments_from_its_attention_is_refused_by_name(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, "", config=NemotronConfig(**_SIZES))
    with pytest.raises(UnsupportedModelError, match=r"NemotronForCausalLM.*does not pass arguments"):
        load(folder)


def test_facts_come_from_the_generation_config(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, "llama")
    (folder / "generation_config.json").write_text(
        '{"eos_token_id": [2, 7], "do_sample": true, "temperature": 0.6, "top_p": 0.9, "max_length": 20}'
    )
    facts = load(folder).facts
    assert facts.eos_token_ids == (2, 7)
    assert facts.generation_defaults == {"do_sample": True, "temperature": 0.6, "top_p": 0.9}
    assert facts.vocab_size == VOCAB_SIZE
    assert facts.max_model_len == 512


def test_without_a_generation_config_the_end_token_is_the_models(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, "llama")
    (folder / "generation_config.json").unlink()
    facts = load(folder).facts
    assert facts.eos_token_ids == (tiny_config("llama").eos_token_id,)
    assert facts.generation_defaults == {}


def test_a_model_length_that_the_default_pool_cannot_hold_is_cut_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_tiny_model(tmp_path, "llama")
    monkeypatch.setattr("worker.loading.default_cpu_cache_bytes", lambda: 5 * 16 * 3 * 2 * 32 * 4)
    loaded = load(folder, max_model_len=None)
    assert loaded.facts.max_model_len == 64
    assert "max_model_len is 64 instead of the model's 2048" in capsys.readouterr().err


def test_a_checkpoint_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from worker.weights import WeightsError

    folder = save_tiny_model(tmp_path, "llama")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=r"lacks 1 tensor.*up_proj"):
        load(folder)
