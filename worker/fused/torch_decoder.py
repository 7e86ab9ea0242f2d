"""The fused decoder in torch alone, for CPUs on which the kernels cannot be built.

Fewer and larger products than Transformers makes, with weights in oneDNN's own layout where that is faster. Attends
through any backend.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import linear, rms_norm, silu
from transformers import PretrainedConfig

from worker.attention.backend import AttentionBackend
from worker.fused.checkpoint import Checkpoint, LayerWeights, LinearWeights
from worker.fused.family import decoder_shape, unfused_reason
from worker.fused.rotary import RotaryTable
from worker.model import ModelShape, shape_from_config

#: number of rows that oneDNN lays the weights out for: few, since small steps are the ones that wait for weights
PACKED_FOR_ROWS = 8


class TorchDecoder:
    """What `CausalModel` is to the runner."""

    def __init__(self, folder: Path, config: PretrainedConfig, dtype: torch.dtype) -> None:
        assert unfused_reason(config) is None
        self.device = torch.device("cpu")
        self.dtype = dtype
        self.shape: ModelShape = shape_from_config(config)
        self._sizes = sizes = decoder_shape(config)
        self.vocab_size = sizes.vocab_size
        self._rotary = RotaryTable(config)
        checkpoint = Checkpoint(folder, sizes, dtype, lambda gate, up: torch.cat([gate, up]))
        self._layers = [_Layer.of(checkpoint.layer(index)) for index in range(sizes.num_layers)]
        self._embedding = checkpoint.embedding()
        self._final_norm = checkpoint.final_norm()
        self._head = _Linear(LinearWeights(checkpoint.head(self._embedding), None))
        self._residual = self._embedding[:0]

    @torch.inference_mode()
    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, logit_rows: torch.Tensor, backend: AttentionBackend
    ) -> torch.Tensor:
        """input_ids [T], positions [T], logit_rows [R] (indices into T) → float32 logits [R, vocabulary]."""
        self._rotary.reach(int(positions.max()) + 1)
        cosine = self._rotary.cosine[positions].to(self.dtype)[:, None]
        sine = self._rotary.sine[positions].to(self.dtype)[:, None]
        residual = self._embedding[input_ids]
        for index, layer in enumerate(self._layers):
            attended = self._attend(index, layer, residual, cosine, sine, backend)
            residual = residual + layer.output(attended)
            gate, up = layer.gate_up(self._norm(residual, layer.weights.post_attention_norm)).chunk(2, dim=-1)
            residual = residual + layer.down(silu(gate).mul_(up))
        self._residual = residual
        return self.logits_of(logit_rows)

    @torch.inference_mode()
    def logits_of(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [R] (indices into the T of the last `forward`) → float32 logits [R, vocabulary]."""
        return self._head(self._norm(self._residual[rows], self._final_norm)).float()

    def _attend(
        self,
        index: int,
        layer: "_Layer",
        residual: torch.Tensor,
        cosine: torch.Tensor,
        sine: torch.Tensor,
        backend: AttentionBackend,
    ) -> torch.Tensor:
        sizes = self._sizes
        qkv = layer.qkv(self._norm(residual, layer.weights.input_norm)).unflatten(-1, (-1, sizes.head_size))
        query, key, value = qkv.split([sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads], dim=1)
        if layer.weights.query_norm is not None and layer.weights.key_norm is not None:
            query, key = self._norm(query, layer.weights.query_norm), self._norm(key, layer.weights.key_norm)
        attended = backend.forward(
            index,
            _rotate(query, cosine, sine),
            _rotate(key, cosine, sine),
            value,
            scale=sizes.head_size**-0.5,
            sliding_window=layer.weights.window,
        )
        return attended.flatten(1)

    def _norm(self, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(values, weight.shape, weight, self._sizes.epsilon)


@dataclass(slots=True, eq=False)
class _Layer:
    weights: LayerWeights
    qkv: "_Linear"
    output: "_Linear"
    gate_up: "_Linear"
    down: "_Linear"

    @staticmethod
    def of(weights: LayerWeights) -> "_Layer":
        return _Layer(
            weights, _Linear(weights.qkv), _Linear(weights.output), _Linear(weights.gate_up), _Linear(weights.down)
        )


class _Linear:
    """A linear layer in oneDNN's layout for bfloat16 on CPUs that multiply it, in torch's own otherwise."""

    def __init__(self, weights: LinearWeights) -> None:
        self._bias = weights.bias
        is_packed = weights.weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weights.weight, PACKED_FOR_ROWS) if is_packed else None
        self._weight = None if is_packed else weights.weight
        if is_packed:
            weights.weight = weights.weight.new_empty(0)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if self._packed is None:
            return linear(rows, self._weight, self._bias)
        return torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, "none", [], "")


def _rotate(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    real, imaginary = heads.chunk(2, dim=-1)
    return torch.cat([real * cosine - imaginary * sine, imaginary * cosine + real * sine], dim=-1)
