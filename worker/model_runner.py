"""From a step's decisions to logits: flat tensors in, one row of logits for each row that samples.

Moves no blocks: the engine applies a step's swaps before it calls `run`.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from kv_cache.tensor_pool import TensorPool
from scheduler.outputs import PENDING_TOKEN_ID, SchedulerOutputs
from worker.attention.backend import AttentionBackend, AttentionBatch
from worker.decode_graphs import CaptureReport, DecodeGraphs, GraphRecorder, padded_sizes
from worker.device import open_device
from worker.flat_batch import FlatBatch
from worker.model import ModelShape
from worker.pending_tokens import DeviceTokens, PendingTokens, pending_tokens


class RunnableModel(Protocol):
    """What the runner needs of a model: `CausalModel` and the fused decoders."""

    device: torch.device
    dtype: torch.dtype
    shape: ModelShape
    vocab_size: int

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, logit_rows: torch.Tensor, backend: AttentionBackend
    ) -> torch.Tensor: ...

    def logits_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Of any rows [R] (indices into T) of the last `forward`: float32 logits [R, vocabulary]. What `forward`
        returned stays as it is."""
        ...


@dataclass(slots=True, eq=False)
class PreparedStep:
    """A step as flat tensors, ready to run once; `pending` are tokens that the step before is still to sample. With a
    `graph_size` it was filled up to so many rows, of which `num_rows` are its own."""

    input_ids: torch.Tensor
    logit_rows: torch.Tensor
    batch: AttentionBatch
    pending: PendingTokens | None
    num_rows: int
    graph_size: int | None


class ModelRunner:
    """Runs mixed prefill and decode rows in one forward pass."""

    def __init__(
        self,
        model: RunnableModel,
        tensor_pool: TensorPool,
        backend: AttentionBackend,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_blocks_per_sequence: int,
        num_steps_in_flight: int = 1,
    ) -> None:
        self._model = model
        self._backend = backend
        self._device = open_device(model.device)
        self._batch = FlatBatch(
            max_num_batched_tokens,
            max_num_seqs,
            max_blocks_per_sequence,
            tensor_pool.block_size,
            model.device,
            num_steps_in_flight,
        )
        self._max_num_seqs = max_num_seqs
        self._graphs: DecodeGraphs | None = None

    def capture_decode_steps(self, max_bytes: int, recorder: GraphRecorder) -> CaptureReport:
        """From now on run steps of one token a row as graphs, as many sizes as `max_bytes` of the device's memory have
        room for. The backend must be one that can be captured."""
        assert self._backend.features.cuda_graphs, f"{self._backend.name} plans each step on the host"
        graphs = DecodeGraphs(self._batch, self._forward, self._model.vocab_size, self._model.device)
        report = graphs.capture(padded_sizes(self._max_num_seqs), max_bytes, recorder)
        self._graphs = graphs if report.sizes else None
        return report

    def prepare(self, outputs: SchedulerOutputs) -> PreparedStep | None:
        """The host's part of a step, while the one before may still run; None: there is nothing to run. To be run
        before `num_steps_in_flight` more are prepared."""
        chunks = outputs.chunks
        if not chunks:
            return None
        graphs, size = self._graphs, None
        if graphs is not None and (size := graphs.size_for(chunks)) is not None:
            chunks = graphs.padded(chunks, size)
        input_ids, logit_rows, batch = self._batch.fill(chunks, has_fixed_shape=size is not None)
        pending = None
        if self._batch.lowest_token_id <= PENDING_TOKEN_ID:
            pending = pending_tokens(chunks)
        return PreparedStep(input_ids, logit_rows, batch, pending, len(outputs.chunks), size)

    @torch.inference_mode()
    def run(self, step: PreparedStep | None, before: DeviceTokens | None = None) -> torch.Tensor:
        """Logits of the chunks with `do_sample`, in their order: float32 [number of them, vocabulary].

        They may be overwritten by the next call. `before`: what the step before sampled, where it is not told yet.
        """
        if step is None:
            return torch.empty((0, self._model.vocab_size), device=self._model.device)
        if step.pending is not None:
            assert before is not None, "a token was scheduled that is not known yet"
            step.pending.fill_in(step.input_ids, before, self._device)
        if step.graph_size is not None:
            assert self._graphs is not None
            return self._graphs.replay(step.graph_size)[: step.num_rows]
        return self._forward(step.input_ids, step.logit_rows, step.batch)

    def _forward(self, input_ids: torch.Tensor, logit_rows: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        self._backend.begin(batch)
        return self._model.forward(input_ids, batch.positions, logit_rows, self._backend)

    def execute(self, outputs: SchedulerOutputs) -> torch.Tensor:
        """`prepare` and `run` of a step whose tokens are all known."""
        return self.run(self.prepare(outputs))

    @torch.inference_mode()
    def logits_of(self, places: list[int]) -> torch.Tensor:
        """Logits after any tokens of the step that ran last, by their places in it (its chunks' tokens one after the
        other): float32 [places, vocabulary]. What `run` returned stays as it is."""
        return self._model.logits_of(torch.tensor(places, device=self._model.device))
