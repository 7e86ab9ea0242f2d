"""Reads a checkpoint's safetensors one layer at a time and merges what the fused decoder multiplies at once.

Knows names and shapes of tensors. A tensor that is missing or has another shape is an error: the kernels that read
them check nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from worker.fused.family import DecoderShape
from worker.weights import WeightsError, weight_files

_HEAD = "lm_head.weight"
#: merges the weights, or the biases, of the gate and the up projection
MergeGateUp = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(slots=True, eq=False)
class LinearWeights:
    """weight [outputs, inputs] in the model's dtype, bias [outputs] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(slots=True, eq=False)
class LayerWeights:
    input_norm: torch.Tensor
    post_attention_norm: torch.Tensor
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    qkv: LinearWeights
    output: LinearWeights
    gate_up: LinearWeights
    down: LinearWeights
    window: int | None


class Checkpoint:
    """The tensors of a folder by name, in one dtype."""

    def __init__(self, folder: Path, shape: DecoderShape, dtype: torch.dtype, merge_gate_up: MergeGateUp) -> None:
        self._folder = folder
        self._shape = shape
        self._dtype = dtype
        self._merge_gate_up = merge_gate_up
        self._files = {}
        for path in weight_files(folder):
            handle = safe_open(path, framework="pt")
            self._files.update(dict.fromkeys(handle.keys(), handle))
        # A base model saved without its head has no prefix.
        self._prefix = "model." if any(name.startswith("model.") for name in self._files) else ""
        self._check_complete()

    def embedding(self) -> torch.Tensor:
        return self._read(self._embedding_name(), self._shape.vocab_size, self._shape.hidden_size)

    def final_norm(self) -> torch.Tensor:
        return self._read(f"{self._prefix}norm.weight", self._shape.hidden_size)

    def head(self, embedding: torch.Tensor) -> torch.Tensor:
        """The output head: `embedding` where the two are tied. A head that differs is not, whatever the configuration
        says: so Transformers decides."""
        if self._shape.ties_embeddings and _HEAD not in self._files:
            return embedding
        head = self._read(_HEAD, self._shape.vocab_size, self._shape.hidden_size)
        return embedding if self._shape.ties_embeddings and torch.equal(head, embedding) else head

    def layer(self, index: int) -> LayerWeights:
        shape = self._shape
        hidden, head_size = shape.hidden_size, shape.head_size
        query_size, kv_size = shape.num_heads * head_size, shape.num_kv_heads * head_size
        base = f"{self._prefix}layers.{index}."
        attention, mlp = f"{base}self_attn.", f"{base}mlp."

        def linear(name: str, outputs: int, inputs: int, has_bias: bool) -> LinearWeights:
            bias = self._read(f"{name}.bias", outputs) if has_bias else None
            return LinearWeights(self._read(f"{name}.weight", outputs, inputs), bias)

        qkv = [
            linear(f"{attention}{name}_proj", size, hidden, shape.has_qkv_bias)
            for name, size in (("q", query_size), ("k", kv_size), ("v", kv_size))
        ]
        gate, up = (
            linear(f"{mlp}{name}_proj", shape.intermediate_size, hidden, shape.has_mlp_bias) for name in ("gate", "up")
        )
        return LayerWeights(
            input_norm=self._read(f"{base}input_layernorm.weight", hidden),
            post_attention_norm=self._read(f"{base}post_attention_layernorm.weight", hidden),
            query_norm=self._read(f"{attention}q_norm.weight", head_size) if shape.has_head_norms else None,
            key_norm=self._read(f"{attention}k_norm.weight", head_size) if shape.has_head_norms else None,
            qkv=_merge(qkv, lambda *parts: torch.cat(parts)),
            output=linear(f"{attention}o_proj", hidden, query_size, shape.has_output_bias),
            gate_up=_merge([gate, up], self._merge_gate_up),
            down=linear(f"{mlp}down_proj", hidden, shape.intermediate_size, shape.has_mlp_bias),
            window=shape.windows[index],
        )

    def _names(self) -> list[str]:
        shape = self._shape
        parts = ["input_layernorm.weight", "post_attention_layernorm.weight"]
        parts += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"] * shape.has_head_norms
        for names, has_bias in (
            (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), shape.has_qkv_bias),
            (("self_attn.o_proj",), shape.has_output_bias),
            (("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"), shape.has_mlp_bias),
        ):
            parts += [f"{name}.weight" for name in names]
            parts += [f"{name}.bias" for name in names] * has_bias
        layers = [f"{self._prefix}layers.{index}.{part}" for index in range(shape.num_layers) for part in parts]
        head = [] if shape.ties_embeddings else [_HEAD]
        return [self._embedding_name(), f"{self._prefix}norm.weight", *layers, *head]

    def _embedding_name(self) -> str:
        name = f"{self._prefix}embed_tokens.weight"
        # Of two that are tied either may be the stored one.
        return _HEAD if self._shape.ties_embeddings and name not in self._files and _HEAD in self._files else name

    def _check_complete(self) -> None:
        missing = sorted(name for name in self._names() if name not in self._files)
        if missing:
            raise WeightsError(
                f"{self._folder} lacks {len(missing)} tensors of this model or has them in another shape: {missing[0]}"
            )

    def _read(self, name: str, *sizes: int) -> torch.Tensor:
        tensor = self._files[name].get_tensor(name)
        if tuple(tensor.shape) != sizes:
            raise WeightsError(
                f"{self._folder} lacks 1 tensors of this model or has them in another shape: "
                f"{name} is {list(tensor.shape)} instead of {list(sizes)}"
            )
        return tensor.to(self._dtype)


def _merge(parts: list[LinearWeights], merge: Callable[..., torch.Tensor]) -> LinearWeights:
    bias = None if parts[0].bias is None else merge(*(part.bias for part in parts))
    return LinearWeights(merge(*(part.weight for part in parts)), bias)
