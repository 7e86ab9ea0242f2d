"""Decode steps as CUDA graphs: a step of one token a row is replayed as a whole, not launched kernel by kernel.

Owns the captured sizes and the memory of their logits. Knows neither requests nor what a model computes.
"""

import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from scheduler.outputs import ScheduledChunk
from worker.attention.backend import AttentionBatch
from worker.flat_batch import PADDING, FlatBatch

Work = Callable[[], None]
#: (token ids [T], places in T whose logits are wanted, the batch) → float32 logits [places, vocabulary]
Forward = Callable[[torch.Tensor, torch.Tensor, AttentionBatch], torch.Tensor]


class GraphRecorder(Protocol):
    """Captures work of the device: the same launches again, over the same memory."""

    def capture(self, work: Work) -> Work:
        """Run `work`, then capture it; what is returned replays it. RuntimeError if it cannot be captured."""
        ...

    def used_bytes(self) -> int:
        """What has been taken of the device's memory since this recorder was made, less what nobody uses any more."""
        ...


@dataclass(slots=True)
class CaptureReport:
    """Sizes in rows. `failure`: why nothing was captured although it fits."""

    sizes: list[int] = field(default_factory=list)
    left_out: list[int] = field(default_factory=list)
    num_bytes: int = 0
    duration_s: float = 0.0
    failure: str | None = None

    def note(self) -> str:
        """A sentence for the operator."""
        if self.failure is not None:
            return f"decode steps run without CUDA graphs: {self.failure}"
        left_out = f"; no room for {', '.join(map(str, self.left_out))}" if self.left_out else ""
        return (
            f"CUDA graphs of decode steps of {', '.join(map(str, self.sizes)) or 'no'} rows: "
            f"{self.num_bytes / 2**20:.0f} MiB, {self.duration_s:.1f} s{left_out}"
        )


class DecodeGraphs:
    """Every size has its graph, all of them the same memory: a replay overwrites what the one before gave."""

    def __init__(self, batch: FlatBatch, forward: Forward, vocab_size: int, device: torch.device) -> None:
        self._batch = batch
        self._forward = forward
        self._vocab_size = vocab_size
        self._device = device
        self._replays: dict[int, Work] = {}
        self._sizes: list[int] = []
        self._logits = torch.empty((0, vocab_size), device=device)

    @torch.inference_mode()
    def capture(
        self, sizes: list[int], max_bytes: int, recorder: GraphRecorder, clock: Callable[[], float] = time.monotonic
    ) -> CaptureReport:
        """Capture steps of these numbers of rows within `max_bytes`, the largest first: the others find room in its
        memory. What does not fit is left out."""
        began_s, report = clock(), CaptureReport()
        for size in sorted(sizes, reverse=True):
            if not self._replays:
                self._logits = torch.empty((size, self._vocab_size), device=self._device)
            try:
                replay = recorder.capture(self._step(size))
            except torch.OutOfMemoryError:
                replay = None  # it is left out, and the report says so
            except RuntimeError as error:
                self._replays.clear()
                report.failure = str(error).partition("\n")[0]
                break
            if replay is not None and recorder.used_bytes() <= max_bytes:
                self._replays[size] = replay
            else:
                report.left_out.append(size)
            replay = None  # nobody else may hold the memory of one that is left out
        if not self._replays:
            self._logits = self._logits[:0].clone()
        self._sizes = sorted(self._replays)
        report.sizes, report.num_bytes, report.duration_s = self._sizes, recorder.used_bytes(), clock() - began_s
        return report

    def size_for(self, chunks: list[ScheduledChunk]) -> int | None:
        """The smallest captured size that holds this step; None: it is no such step, or a larger one."""
        place = bisect_left(self._sizes, len(chunks))
        if place == len(self._sizes):
            return None
        for chunk in chunks:
            if chunk.is_prefill or not chunk.do_sample or len(chunk.token_ids) != 1:
                return None
        return self._sizes[place]

    def padded(self, chunks: list[ScheduledChunk], size: int) -> list[ScheduledChunk]:
        """What the flat batch is to be filled with, in its fixed shape, before `replay(size)`."""
        return chunks + [PADDING] * (size - len(chunks))

    def replay(self, size: int) -> torch.Tensor:
        """Logits of all rows: float32 [size, vocabulary], until the next call."""
        self._replays[size]()
        return self._logits[:size]

    def _step(self, size: int) -> Work:
        input_ids, logit_rows, batch = self._batch.fill(self.padded([], size), has_fixed_shape=True)

        def work() -> None:
            self._logits[:size].copy_(self._forward(input_ids, logit_rows, batch))

        return work


class CudaGraphRecorder:
    """Graphs that share one pool of memory and one stream."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()
        self._free_at_first = _free_bytes()

    def capture(self, work: Work) -> Work:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        try:
            # Libraries and kernels that are loaded when they are first needed cannot be captured while they are.
            with torch.cuda.stream(self._stream):
                work()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                work()
        finally:
            torch.cuda.set_stream(current)  # a capture that fails leaves its own behind
        current.wait_stream(self._stream)
        return graph.replay

    def used_bytes(self) -> int:
        return self._free_at_first - _free_bytes()


def _free_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free: int = torch.cuda.mem_get_info()[0]
    return free


def padded_sizes(max_rows: int) -> list[int]:
    """Numbers of rows that steps of up to `max_rows` are filled up to: 1, 2, 4, 8, then multiples of 8 up to 64, of 16
    up to 128, of 32 beyond, and `max_rows` itself. Less than half of a step is padding, from 33 rows on less than a
    fifth."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, max_rows, 32)]
    return [*(size for size in sizes if size < max_rows), max_rows]
