"""Decode steps as CUDA graphs against the same steps launched kernel by kernel: logits and time.

On a CPU the graphs are those of the tests: PyTorch's operations, run again over the same memory.
"""

import random
from collections.abc import Callable

import torch

from tests.fake_graphs import FakeRecorder
from tests.gpu.backends import TIMED_BACKEND, TIMED_BLOCK_SIZE
from tests.gpu.models import Parts, cache_bytes_per_token, fill_with_noise, load_parts, weight_bytes
from tests.gpu.parts import Bench, Case
from tests.gpu.report import Outcome, Verdict, judged
from tests.gpu.sizes import LLAMA_TINY, ModelSize
from tests.gpu.steps import blocks_for, decode_step
from tests.gpu.timing import wall_s
from tests.plain_decodes import PlainDecodesBackend
from worker.config import DEFAULT_CUDA_GRAPH_BYTES, EngineConfig
from worker.decode_graphs import CaptureReport, CudaGraphRecorder, GraphRecorder

#: logits of the tiny model are below 1; another number of rows takes other kernels, which round otherwise
LOGIT_LIMIT = 1e-4
#: numbers of rows whose logits are compared, those that the largest batch has room for; most are filled up
NUMS_OF_ROWS = (1, 3, 8, 30, 100)


class Both:
    """Two runners over the same model and cache: one launches every step, the other replays what it captured."""

    def __init__(self, bench: Bench, size: ModelSize, dtype: torch.dtype) -> None:
        self.max_rows = max(bench.sizes.decode_batches)
        self.block_size = TIMED_BLOCK_SIZE[bench.device]
        self.parts = self._load(bench, size, dtype)
        self.eager, self.graphs = self.parts.runner(), self.parts.runner()
        recorder: GraphRecorder = CudaGraphRecorder() if bench.device == "cuda" else FakeRecorder()
        self.report: CaptureReport = self.graphs.capture_decode_steps(DEFAULT_CUDA_GRAPH_BYTES, recorder)

    def _load(self, bench: Bench, size: ModelSize, dtype: torch.dtype) -> Parts:
        context = bench.sizes.decode_context
        config = EngineConfig(
            device=bench.device,
            attention_backend=TIMED_BACKEND[bench.device],
            block_size=self.block_size,
            max_model_len=context + 1,
            max_num_batched_tokens=self.max_rows,
            max_num_seqs=self.max_rows,
            num_device_blocks=1 + self.max_rows * blocks_for(context + 1, self.block_size),
            num_host_blocks=1,
        )
        # The plain backend of a CPU plans on the host, which no graph can hold.
        parts = load_parts(size, dtype, config, PlainDecodesBackend if bench.device == "cpu" else None)
        fill_with_noise(parts.pool)
        return parts

    def is_captured(self, contexts: list[int]) -> bool:
        prepared = self.graphs.prepare(decode_step(contexts, self.block_size))
        return prepared is not None and prepared.graph_size is not None


def cases(bench: Bench) -> list[Case]:
    made: dict[str, Both] = {}
    timed = bench.sizes.models[0]

    def both(size: ModelSize, dtype: torch.dtype) -> Both:
        if size.name not in made:
            made.clear()
            made[size.name] = Both(bench, size, dtype)
        return made[size.name]

    return [
        Case("logits of tiny in float32", lambda: same_logits(bench, both(LLAMA_TINY, torch.float32))),
        Case(f"capture of {timed.name}", lambda: capture(bench, lambda: both(timed, bench.sizes.dtype), timed)),
        *(
            Case(f"{timed.name} batch {batch}", lambda batch=batch: times(bench, both(timed, bench.sizes.dtype), batch))
            for batch in bench.sizes.decode_batches
        ),
    ]


def same_logits(bench: Bench, both: Both) -> Outcome:
    """Steps of random lengths one after the other, so that a replay that reads an earlier step's numbers shows."""
    numbers, worst, nums_of_rows = random.Random(3), 0.0, []
    for num_rows in NUMS_OF_ROWS:
        if num_rows > both.max_rows:
            continue
        contexts = [numbers.randint(1, bench.sizes.decode_context) for _ in range(num_rows)]
        step = decode_step(contexts, both.block_size)
        wanted = both.eager.execute(step).clone()
        if not both.is_captured(contexts):
            return Outcome(f"a step of {num_rows} rows is not replayed: {both.report.note()}", verdict=Verdict.FAILED)
        difference = (both.graphs.execute(step) - wanted).abs().max().item()
        worst = max(worst, difference) if difference == difference else torch.inf
        nums_of_rows.append(num_rows)
    text = f"{both.parts.backend_type.name}: off by {worst:.1e} at most (limit {LOGIT_LIMIT:.0e}), rows {nums_of_rows}"
    return judged(worst <= LOGIT_LIMIT, text, {"max_difference": worst})


def capture(bench: Bench, both: Callable[[], Both], size: ModelSize) -> Outcome:
    """What the start of an engine takes for it."""
    cache_bytes = cache_bytes_per_token(size, bench.sizes.dtype) * bench.sizes.decode_context
    if not bench.has_memory_for(weight_bytes(size, bench.sizes.dtype) + max(bench.sizes.decode_batches) * cache_bytes):
        return Outcome("the device has not the memory for it", verdict=Verdict.LEFT_OUT)
    report = both().report
    figures = {"graph_bytes": report.num_bytes, "capture_s": report.duration_s, "num_graphs": len(report.sizes)}
    return judged(bool(report.sizes) and report.failure is None, report.note(), figures)


def times(bench: Bench, both: Both, batch: int) -> Outcome:
    contexts = [bench.sizes.decode_context] * batch
    step = decode_step(contexts, both.block_size)
    if not both.is_captured(contexts):
        return Outcome(f"not replayed: {both.report.note()}", verdict=Verdict.FAILED)
    eager_s, graph_s = (
        wall_s(lambda runner=runner: runner.execute(step), bench.device, bench.sizes.num_repeats)
        for runner in (both.eager, both.graphs)
    )
    text = f"{graph_s * 1000:.2f} ms a step, launched one by one {eager_s * 1000:.2f} ms: {eager_s / graph_s:.2f} times"
    return Outcome(text, {"graph_ms": graph_s * 1000, "eager_ms": eager_s * 1000, "ratio": eager_s / graph_s})
