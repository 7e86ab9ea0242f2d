"""The fused decoder by our CPU kernels: one call runs all layers of a step.

Owns packed weights and working memory. Knows flat batches, not requests.
"""

import ctypes
from pathlib import Path

import torch
from transformers import PretrainedConfig

from kv_cache.huge_pages import advise_huge_pages
from kv_cache.tensor_pool import TensorPool
from worker.attention.cpu_native import CpuNativeBackend
from worker.fused.checkpoint import Checkpoint, LinearWeights
from worker.fused.family import DecoderShape, decoder_shape, unfused_reason
from worker.fused.rotary import RotaryTable
from worker.fused.weight_memory import WeightMemory
from worker.model import ModelShape, shape_from_config
from worker.native import structures
from worker.native.kernels import DTYPE_NAMES, LANES, MAX_HEAD_SIZE, Kernels, interleave, pack_weight


def not_native_reason(config: PretrainedConfig, dtype: torch.dtype) -> str | None:
    """Why the kernels do not run this model; None if they do."""
    reason = unfused_reason(config)
    if reason is not None:
        return reason
    if dtype not in DTYPE_NAMES:
        return f"dtype {dtype}"
    shape = decoder_shape(config)
    odd = [size for size in (shape.hidden_size, shape.intermediate_size, shape.head_size) if size % LANES]
    if odd or shape.head_size > MAX_HEAD_SIZE:
        return f"sizes that are no multiple of {LANES}, or heads of more than {MAX_HEAD_SIZE}"
    return None


class NativeDecoder:
    """What `CausalModel` is to the runner, with the backend `cpu_native` alone.

    A token's logits do not depend on its batch mates or on how its prompt was cut, bit for bit.
    """

    def __init__(self, folder: Path, config: PretrainedConfig, dtype: torch.dtype) -> None:
        assert not_native_reason(config, dtype) is None
        self.device = torch.device("cpu")
        self.dtype = dtype
        self.shape: ModelShape = shape_from_config(config)
        self._sizes = sizes = decoder_shape(config)
        self.vocab_size = sizes.vocab_size
        self._rotary = RotaryTable(config)
        self._weights = WeightMemory()
        checkpoint = Checkpoint(folder, sizes, dtype, interleave)
        self._layers = (structures.Layer * sizes.num_layers)()
        for index in range(sizes.num_layers):
            self._fill_layer(self._layers[index], checkpoint, index)
        embedding = checkpoint.embedding()
        head = checkpoint.head(embedding)
        self._decoder = structures.Decoder(
            ctypes.cast(self._layers, ctypes.POINTER(structures.Layer)),
            self._keep(embedding),
            self._keep(checkpoint.final_norm().float()),
            self._linear(LinearWeights(head, None)),
            sizes.num_layers,
            sizes.hidden_size,
            sizes.intermediate_size,
            sizes.num_heads,
            sizes.num_kv_heads,
            sizes.head_size,
            0,
            sizes.epsilon,
            sizes.head_size**-0.5,
        )
        # Without layers and tokens a step is the head alone, over what the last one left in its buffers.
        self._head_alone = structures.Decoder.from_buffer_copy(self._decoder)
        self._head_alone.num_layers = 0
        self._pool: TensorPool | None = None
        self._kernels: Kernels | None = None
        self._num_tokens = 0
        self._memory: _WorkingMemory | None = None

    @torch.inference_mode()
    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, logit_rows: torch.Tensor, backend: CpuNativeBackend
    ) -> torch.Tensor:
        """input_ids [T], positions [T], logit_rows [R] (indices into T) → float32 logits [R, vocabulary].

        The logits are overwritten by the next call.
        """
        batch = backend.batch
        assert batch is not None, "begin() comes before forward()"
        if backend.pool is not self._pool:
            self._bind(backend.pool)
        num_tokens, num_logit_rows, num_threads = len(input_ids), len(logit_rows), torch.get_num_threads()
        scratch_floats = num_threads * backend.kernels.scratch_floats(
            self._sizes.num_heads, self._sizes.num_kv_heads, self._sizes.head_size
        )
        memory = self._memory
        if memory is None or not memory.holds(num_tokens, num_logit_rows, scratch_floats):
            memory = self._memory = _WorkingMemory(
                self._sizes, self.dtype, num_tokens, num_logit_rows, scratch_floats, memory
            )
        rotary = self._rotary
        rotary.reach(max(batch.row_context_lens))
        step = structures.Step(
            input_ids.data_ptr(),
            positions.data_ptr(),
            batch.slot_mapping.data_ptr(),
            rotary.cosine.data_ptr(),
            rotary.sine.data_ptr(),
            batch.block_tables.data_ptr(),
            batch.query_start_locs.data_ptr(),
            batch.context_lens.data_ptr(),
            logit_rows.data_ptr(),
            num_tokens,
            len(batch.query_lens),
            batch.block_tables.shape[1],
            num_logit_rows,
            len(rotary.cosine),
        )
        self._kernels, self._num_tokens = backend.kernels, num_tokens
        is_done = self._kernels.decoder_step(self.dtype, self._decoder, step, memory.buffers, num_threads)
        assert is_done, "a token id has no embedding, or a position no angle"
        return memory.logits[:num_logit_rows]

    @torch.inference_mode()
    def logits_of(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [R] (indices into the T of the last `forward`) → float32 logits [R, vocabulary]."""
        assert self._memory is not None, "forward() comes before logits_of()"
        assert self._kernels is not None
        assert len(rows) <= self._num_tokens, "more rows than the last step had"
        logits = torch.empty(len(rows), self.vocab_size)
        buffers = structures.Buffers.from_buffer_copy(self._memory.buffers)
        buffers.logits = logits.data_ptr()
        step = structures.Step(logit_rows=rows.data_ptr(), num_logit_rows=len(rows))
        self._kernels.decoder_step(self.dtype, self._head_alone, step, buffers, torch.get_num_threads())
        return logits

    def _fill_layer(self, layer: structures.Layer, checkpoint: Checkpoint, index: int) -> None:
        weights = checkpoint.layer(index)
        layer.input_norm = self._keep(weights.input_norm.float())
        layer.post_attention_norm = self._keep(weights.post_attention_norm.float())
        if weights.query_norm is not None and weights.key_norm is not None:
            layer.query_norm = self._keep(weights.query_norm.float())
            layer.key_norm = self._keep(weights.key_norm.float())
        for name in ("qkv", "output", "gate_up", "down"):
            setattr(layer, name, self._linear(getattr(weights, name)))
        layer.window = weights.window or 0

    def _linear(self, linear: LinearWeights) -> structures.Linear:
        n, k = linear.weight.shape
        bias = None if linear.bias is None else self._keep(linear.bias.float())
        return structures.Linear(self._keep(pack_weight(linear.weight)), bias, n, k)

    def _keep(self, tensor: torch.Tensor) -> int:
        """The address of a copy that lives as long as this decoder."""
        return self._weights.keep(tensor).data_ptr()

    def _bind(self, pool: TensorPool) -> None:
        assert pool.dtype == self.dtype
        for index in range(self._sizes.num_layers):
            keys, values = pool.key_value(index)
            self._layers[index].keys, self._layers[index].values = keys.data_ptr(), values.data_ptr()
        self._decoder.block_size = pool.block_size
        self._pool = pool


class _WorkingMemory:
    """Buffers of the largest step so far; they grow and never shrink."""

    def __init__(
        self,
        sizes: DecoderShape,
        dtype: torch.dtype,
        num_tokens: int,
        num_logit_rows: int,
        num_scratch_floats: int,
        smaller: "_WorkingMemory | None",
    ) -> None:
        if smaller is not None:
            num_tokens = max(num_tokens, smaller._num_tokens)
            num_logit_rows = max(num_logit_rows, len(smaller.logits))
        self._num_tokens = num_tokens
        attention_size = sizes.num_heads * sizes.head_size
        self._residual = torch.empty(num_tokens, sizes.hidden_size)
        self._qkv = torch.empty(num_tokens, sizes.qkv_size)
        self._scratch = torch.empty(num_scratch_floats)
        self._stored = [
            torch.empty(num_tokens, size, dtype=dtype)
            for size in (sizes.hidden_size, attention_size, attention_size, sizes.intermediate_size)
        ]
        self.logits = torch.empty(num_logit_rows, sizes.vocab_size)
        advise_huge_pages(self.logits.data_ptr(), self.logits.nbytes)
        tensors = [self._residual, self._qkv, *self._stored, self._scratch, self.logits]
        self.buffers = structures.Buffers(*(tensor.data_ptr() for tensor in tensors))

    def holds(self, num_tokens: int, num_logit_rows: int, num_scratch_floats: int) -> bool:
        return (
            num_tokens <= self._num_tokens
            and num_logit_rows <= len(self.logits)
            and num_scratch_floats == self._scratch.numel()
        )
