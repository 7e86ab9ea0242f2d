"""Steps that are replayed as graphs against the same steps launched operation by operation."""

import random
from pathlib import Path

import pytest
import torch

from kv_cache.tensor_pool import TensorPool
from scheduler.outputs import PENDING_TOKEN_ID, ScheduledChunk, SchedulerOutputs
from tests.fake_graphs import FakeRecorder
from tests.plain_decodes import PlainDecodesBackend
from tests.tiny_models import FAMILIES, VOCAB_SIZE, save_tiny_model
from worker.attention import AttentionBackend, AttentionBatch, AttentionFeatures, TorchSdpaBackend, TritonBackend
from worker.config import DEFAULT_CUDA_GRAPH_BYTES, EngineConfig, resolve_engine_config
from worker.decode_graphs import Work, padded_sizes
from worker.engine import Engine
from worker.loading import LoadedModel, load_model_config, load_runner
from worker.model import CausalModel, load_causal_model
from worker.model_runner import ModelRunner
from worker.pending_tokens import DeviceTokens
from worker.pool_memory import cache_bytes, max_graph_bytes
from worker.types import EngineRequest, SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK_SIZE = 16
MAX_ROWS = 12
AMPLE_BYTES = 1000
NUM_FEW_BLOCKS = 14


def test_sizes_are_dense_where_steps_are_small_and_end_with_the_most_rows() -> None:
    assert padded_sizes(256) == [
        *(1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256),
    ]
    assert padded_sizes(1) == [1]
    assert padded_sizes(3) == [1, 2, 3]
    assert padded_sizes(8) == [1, 2, 4, 8]
    assert padded_sizes(100) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 100]


def test_padding_is_less_than_half_of_a_step_and_of_larger_ones_less_than_a_fifth() -> None:
    for max_rows in (1, 7, 64, 100, 256, 1000):
        sizes = padded_sizes(max_rows)
        for rows in range(1, max_rows + 1):
            size = min(size for size in sizes if size >= rows)
            assert (size - rows) / size < (0.5 if rows < 33 else 0.2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: save_tiny_model(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


def load_plain(folder: Path) -> CausalModel:
    hf_config = load_model_config(folder, trust_remote_code=False)
    return load_causal_model(folder, hf_config, torch.float32, "cpu", PlainDecodesBackend.features)


class Decoding:
    """Sequences that grow by one token in each step that they are in, over a pool filled with one seed's numbers."""

    def __init__(self, model: CausalModel, backend_type: type[AttentionBackend] = PlainDecodesBackend) -> None:
        shape = model.shape
        self.pool = TensorPool(
            shape.num_layers, 60, 0, BLOCK_SIZE, shape.num_kv_heads, shape.head_size, torch.float32, "cpu"
        )
        generator = torch.Generator().manual_seed(1)
        for layer in range(shape.num_layers):
            for cache in self.pool.key_value(layer):
                cache[1:] = torch.randn(cache[1:].shape, generator=generator)
        self.runner = ModelRunner(model, self.pool, backend_type(self.pool), 256, MAX_ROWS, 5)
        ids = list(range(1, 60))
        random.Random(2).shuffle(ids)
        self.tables = [[ids.pop() for _ in range(4)] for _ in range(MAX_ROWS + 2)]
        self.lengths = [(7 * row) % 48 for row in range(MAX_ROWS + 2)]

    def step(self, rows: list[int]) -> torch.Tensor:
        return self.runner.execute(SchedulerOutputs(1, [self.chunk(row) for row in rows])).clone()

    def chunk(self, row: int, size: int = 1, *, is_prefill: bool = False) -> ScheduledChunk:
        start = self.lengths[row]
        self.lengths[row] += size
        tokens = [(11 * row + 5 * start + place) % VOCAB_SIZE for place in range(size)]
        # A sequence's table may be longer than what it has filled.
        return ScheduledChunk(str(row), row, start, tokens, self.tables[row], is_prefill, True)

    def blocks(self) -> torch.Tensor:
        """All of them: [layers, 2, blocks, block size, heads, head size]."""
        return torch.stack([torch.stack(self.pool.key_value(layer)) for layer in range(self.pool.num_layers)])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_padded_replay_gives_the_logits_and_the_cache_of_the_step_itself(
    folders: dict[str, Path], family: str
) -> None:
    model = load_plain(folders[family])
    eager, replayed = Decoding(model), Decoding(model)
    recorder = FakeRecorder()
    report = replayed.runner.capture_decode_steps(AMPLE_BYTES, recorder)
    assert (report.sizes, report.left_out, report.failure) == ([1, 2, 4, 8, 12], [], None)
    draw = random.Random(3)
    for step, num_rows in enumerate((1, 2, 3, 5, 12, 9, 8, 1, 7), 1):
        rows = draw.sample(range(MAX_ROWS + 2), num_rows)
        got, want = replayed.step(rows), eager.step(rows)
        assert recorder.num_replays == step
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
        assert torch.equal(got.argmax(-1), want.argmax(-1))
        torch.testing.assert_close(replayed.blocks(), eager.blocks(), atol=1e-5, rtol=1e-5)
        assert not replayed.blocks()[:, :, 0].any(), "the null block is no longer zero"


class Rerunning(FakeRecorder):
    """For kernels that are not PyTorch's: a replay runs the captured work again, with the batch as it was captured."""

    def capture(self, work: Work) -> Work:
        super().capture(lambda: None)
        return work


def test_our_kernels_take_padded_steps(folders: dict[str, Path]) -> None:
    model = load_plain(folders["mistral"])
    eager, replayed = Decoding(model, TritonBackend), Decoding(model, TritonBackend)
    assert replayed.runner.capture_decode_steps(AMPLE_BYTES, Rerunning()).sizes == [1, 2, 4, 8, 12]
    torch.testing.assert_close(replayed.step([3, 9, 1]), eager.step([3, 9, 1]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(replayed.blocks(), eager.blocks(), atol=1e-5, rtol=1e-5)
    assert not replayed.blocks()[:, :, 0].any()


def test_padding_and_capturing_touch_no_block(folders: dict[str, Path]) -> None:
    decoding = Decoding(load_plain(folders["llama"]))
    before = decoding.blocks()
    decoding.runner.capture_decode_steps(AMPLE_BYTES, FakeRecorder())
    assert torch.equal(decoding.blocks(), before), "capturing has changed blocks"
    start = decoding.lengths[5]
    decoding.step([5])
    decoding.step([5, 5, 5])  # a group of 4 with one row of padding; all write the same sequence
    written = {decoding.tables[5][place // BLOCK_SIZE] for place in range(start, start + 4)}
    others = [block for block in range(decoding.pool.num_device_blocks) if block not in written]
    assert torch.equal(decoding.blocks()[:, :, others], before[:, :, others])


def test_what_is_no_step_of_single_decodes_or_a_larger_one_runs_eagerly(folders: dict[str, Path]) -> None:
    model = load_plain(folders["mistral"])
    eager, decoding = Decoding(model), Decoding(model)
    recorder = FakeRecorder(5, 5, 0)
    report = decoding.runner.capture_decode_steps(4, recorder)
    assert (report.sizes, report.left_out) == ([1, 2, 4], [12, 8])
    assert "12, 8" in report.note()
    for chunks_of in (
        lambda of: [of.chunk(row) for row in range(5)],
        lambda of: [of.chunk(0, 30, is_prefill=True), of.chunk(1)],
        lambda of: [of.chunk(2, 1, is_prefill=True)],
    ):
        got, want = (of.runner.execute(SchedulerOutputs(1, chunks_of(of))) for of in (decoding, eager))
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    assert recorder.num_replays == 0
    decoding.step([0, 1, 2, 3])
    assert recorder.num_replays == 1


def test_tokens_that_the_step_before_has_not_told_yet_reach_a_replay(folders: dict[str, Path]) -> None:
    model = load_plain(folders["llama"])
    told, untold = Decoding(model), Decoding(model)
    untold.runner.capture_decode_steps(AMPLE_BYTES, FakeRecorder())
    rows = [3, 0, 7]
    sampled = torch.tensor([17, 400, -1])
    for decoding, tokens in ((told, [17, 400, 0]), (untold, [PENDING_TOKEN_ID] * 3)):
        chunks = [decoding.chunk(row) for row in rows]
        for chunk, token in zip(chunks, tokens, strict=True):
            chunk.token_ids[0] = token
        step = decoding.runner.prepare(SchedulerOutputs(1, chunks))
        before = DeviceTokens(sampled, {row: place for place, row in enumerate(rows)})
        logits = decoding.runner.run(step, before if decoding is untold else None).clone()
        if decoding is told:
            want = logits
    torch.testing.assert_close(logits, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(untold.blocks(), told.blocks(), atol=1e-5, rtol=1e-5)


def test_a_row_that_does_not_sample_is_no_row_of_a_graph(folders: dict[str, Path]) -> None:
    decoding = Decoding(load_plain(folders["llama"]))
    recorder = FakeRecorder()
    decoding.runner.capture_decode_steps(AMPLE_BYTES, recorder)
    chunks = [decoding.chunk(0), decoding.chunk(1)]
    chunks[0].do_sample = False
    assert decoding.runner.execute(SchedulerOutputs(1, chunks)).shape == (1, VOCAB_SIZE)
    assert recorder.num_replays == 0


def test_sizes_are_captured_largest_first_within_the_bound(folders: dict[str, Path]) -> None:
    model = load_plain(folders["llama"])
    report = Decoding(model).runner.capture_decode_steps(100, FakeRecorder(101, 60, 30, 20, 9))
    assert (report.sizes, report.left_out, report.num_bytes) == ([1, 4, 8], [12, 2], 99)
    report = Decoding(model).runner.capture_decode_steps(100, FakeRecorder(None, 10))
    assert (report.sizes, report.left_out, report.num_bytes) == ([1, 2, 4, 8], [12], 40)
    starved = Decoding(model)
    recorder = FakeRecorder(7)
    report = starved.runner.capture_decode_steps(6, recorder)
    assert (report.sizes, report.left_out, report.num_bytes) == ([], [12, 8, 4, 2, 1], 0)
    starved.step([0])
    assert recorder.num_replays == 0


class AsksTheDevice(PlainDecodesBackend):
    def begin(self, batch: AttentionBatch) -> None:
        super().begin(batch)
        assert int(batch.context_lens.max()) >= 0


def test_what_cannot_be_captured_runs_eagerly_and_the_note_says_why(folders: dict[str, Path]) -> None:
    model = load_plain(folders["llama"])
    eager, decoding = Decoding(model), Decoding(model, AsksTheDevice)
    report = decoding.runner.capture_decode_steps(AMPLE_BYTES, FakeRecorder())
    assert (report.sizes, report.num_bytes) == ([], 0)
    assert "without CUDA graphs: operation not permitted while a stream is captured" in report.note()
    torch.testing.assert_close(decoding.step([0, 4]), eager.step([0, 4]), atol=1e-5, rtol=1e-5)


def test_a_backend_that_plans_on_the_host_is_not_captured(folders: dict[str, Path]) -> None:
    decoding = Decoding(load_plain(folders["llama"]), TorchSdpaBackend)
    with pytest.raises(AssertionError, match="torch_sdpa plans each step on the host"):
        decoding.runner.capture_decode_steps(AMPLE_BYTES, FakeRecorder())


def answers(folder: Path, recorder: FakeRecorder | None) -> tuple[dict[tuple[str, int], list[int]], int]:
    """Tokens of requests that come over time to an engine that swaps, and how many blocks it swapped out."""
    config = EngineConfig(
        model=str(folder),
        attention_backend="torch_sdpa",
        max_model_len=128,
        max_num_batched_tokens=64,
        max_num_seqs=MAX_ROWS,
        num_device_blocks=NUM_FEW_BLOCKS,
        num_host_blocks=60,
        preemption_mode="swap",
    )
    loaded = load_runner(config)
    shape, resolved = loaded.runner._model.shape, loaded.config
    pool = TensorPool(
        shape.num_layers, NUM_FEW_BLOCKS, 60, BLOCK_SIZE, shape.num_kv_heads, shape.head_size, torch.float32, "cpu"
    )
    runner = ModelRunner(
        loaded.runner._model, pool, PlainDecodesBackend(pool), 64, MAX_ROWS, resolved.max_blocks_per_sequence
    )
    if recorder is not None:
        runner.capture_decode_steps(AMPLE_BYTES, recorder)
    engine = Engine.__new__(Engine)
    engine._wire(LoadedModel(runner, pool, resolved, loaded.facts), lambda: 0.0)
    draw = random.Random(4)
    tokens: dict[tuple[str, int], list[int]] = {}
    for number in range(14):
        prompt = [draw.randrange(3, VOCAB_SIZE) for _ in range(draw.randint(3, 60))]
        params = SamplingParams(
            temperature=draw.choice([0.0, 0.9]), seed=number, n=draw.choice([1, 1, 2]), max_tokens=draw.randint(5, 40)
        )
        engine.add_request(EngineRequest(str(number), prompt, params), 0.0)
        for _ in range(3):
            collect(engine, tokens)
    while engine.has_unfinished():
        collect(engine, tokens)
    engine.check_integrity()
    return tokens, engine.totals.num_blocks_swapped_out


def collect(engine: Engine, tokens: dict[tuple[str, int], list[int]]) -> None:
    for event in engine.step(0.0):
        tokens.setdefault((event.request_id, event.index), []).extend(event.token_ids)


def test_answers_of_an_engine_are_the_same_with_graphs_and_without(folders: dict[str, Path]) -> None:
    recorder = FakeRecorder()
    want, num_swapped = answers(folders["qwen3"], None)
    assert num_swapped > 0
    assert answers(folders["qwen3"], recorder)[0] == want
    assert recorder.num_replays > 20


GRAPHS = AttentionFeatures(sliding_window=True, softcap=False, sinks=False, cuda_graphs=True)


def test_steps_are_captured_on_cuda_unless_eager_ones_are_asked_for_or_the_backend_plans_on_the_host() -> None:
    assert max_graph_bytes(EngineConfig(), GRAPHS, "cuda") == DEFAULT_CUDA_GRAPH_BYTES
    assert max_graph_bytes(EngineConfig(cuda_graph_memory=5), GRAPHS, "cuda") == 5
    assert max_graph_bytes(EngineConfig(enforce_eager=True, cuda_graph_memory=5), GRAPHS, "cuda") == 0
    assert max_graph_bytes(EngineConfig(), TorchSdpaBackend.features, "cuda") == 0
    assert max_graph_bytes(EngineConfig(), GRAPHS, "cpu") == 0


def test_the_cache_leaves_room_for_graphs_and_for_staging_memory() -> None:
    options = EngineConfig(max_model_len=64, num_host_blocks=5)
    resolved = resolve_engine_config(
        options, device_type="cuda", model_max_len=64, block_bytes=100, cache_memory_bytes=2**60
    )
    assert cache_bytes(10_000, resolved, 100, 3_000) == 10_000 - 3_000 - 4 * 5 * 100
    assert cache_bytes(1_000, resolved, 100, 3_000) == 0
