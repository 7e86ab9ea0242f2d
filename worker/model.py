"""A Transformers causal model that runs one flat batch through an attention backend.

Owns the model and the bridge to its attention. Knows neither rows' requests nor how blocks are laid out.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from worker.attention.backend import AttentionBackend, AttentionBatch, AttentionFeatures, AttentionNotSupported
from worker.model_config import one_line
from worker.model_support import UnsupportedModelError, architecture_name
from worker.weights import WeightsError

ATTENTION_NAME = "stallfree_paged"
#: what says nothing of the model
_MEMORY_ERRORS = (MemoryError, torch.OutOfMemoryError)


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Of Transformers, which draws one on standard error; what the program itself has asked of it holds afterwards."""
    was_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            transformers_logging.enable_progress_bar()


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the cache and the limits need to know of a model."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    max_position_embeddings: int


def shape_from_config(config: PretrainedConfig) -> ModelShape:
    """The shape that a configuration announces; `CausalModel` checks it against what the layers really do."""
    num_heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    # Absent or null means one key-value head per query head.
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    if getattr(config, "multi_query", False):
        num_kv_heads = 1
    return ModelShape(config.num_hidden_layers, num_kv_heads, head_size, config.max_position_embeddings)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    attention_backend: AttentionBackend | None = None,
    dropout: float = 0.0,
    position_ids: torch.Tensor | None = None,
    use_cache: bool | None = None,
    output_attentions: bool | None = None,
    is_causal: bool | None = None,
    cache_position: torch.Tensor | None = None,
    **unknown: object,
) -> tuple[torch.Tensor, None]:
    """What Transformers calls in each layer: query [1, heads, T, head_size] → [1, T, heads, head_size].

    An argument that is not understood is an error, since it may change what attention means.
    """
    given = sorted(name for name, argument in unknown.items() if argument is not None and argument is not False)
    if given or attention_mask is not None or is_causal is False or output_attentions:
        raise AttentionNotSupported(f"its attention asks for what is not implemented ({', '.join(given) or 'a mask'})")
    if attention_backend is None:
        raise AttentionNotSupported("it does not pass arguments on to its attention")
    output = attention_backend.forward(
        module.layer_idx,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return output[None], None


def load_causal_model(
    folder: Path,
    config: PretrainedConfig,
    dtype: torch.dtype,
    device: str,
    features: AttentionFeatures,
    *,
    trust_remote_code: bool = False,
) -> "CausalModel":
    """Load a folder's safetensors (never a pickle) and check that its layers are what the engine can run."""
    # No mask function is registered under this name: Transformers then builds none, and the backend masks.
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    try:
        with _no_progress_bar():
            model, loading = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                use_safetensors=True,
                weights_only=True,
                local_files_only=True,
                trust_remote_code=trust_remote_code,
                # They are refused below, by name.
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except _MEMORY_ERRORS:
        raise
    except Exception as error:  # each family's code raises what it likes
        reason = f"Transformers cannot build it ({one_line(error)})"
        raise UnsupportedModelError(architecture_name(config), reason) from error
    # Transformers fills what a checkpoint lacks with random numbers and only warns.
    mismatched = [
        f"{name} is {list(stored)} instead of {list(built)}" for name, stored, built in loading["mismatched_keys"]
    ]
    broken = sorted([*loading["missing_keys"], *mismatched])
    if broken:
        raise WeightsError(
            f"{folder} lacks {len(broken)} tensors of this model or has them in another shape: {broken[0]}"
        )
    return CausalModel(model.to(device).eval(), features)


class CausalModel:
    """A decoder whose every layer attends through the backend it is given, exactly once a step."""

    def __init__(self, model: PreTrainedModel, features: AttentionFeatures) -> None:
        self.device = model.device
        self.dtype = model.dtype
        self._model = model
        # The model below the head keeps what it gave last, for `logits_of`.
        self._trunk = model.base_model
        self._trunk.register_forward_hook(self._keep)
        self._kept: Any = None
        self._inputs: dict[str, torch.Tensor] = {}
        self.shape, self.vocab_size = self._examine(features)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        logit_rows: torch.Tensor,
        backend: AttentionBackend,
    ) -> torch.Tensor:
        """input_ids [T], positions [T], logit_rows [R] (indices into T) → float32 logits [R, vocabulary].

        The causal model's own forward picks the rows before its head, so whatever the family does to its
        logits (scaling, softcapping) is done, and only where it is wanted.
        """
        self._inputs = {"input_ids": input_ids[None], "position_ids": positions[None]}
        outputs = self._model(
            **self._inputs, use_cache=False, logits_to_keep=logit_rows, attention_backend=backend
        )
        return outputs.logits[0].float()

    def logits_of(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [R] (indices into the T of the last `forward`) → float32 logits [R, vocabulary].

        The causal model runs again, on what the model below its head gave last: families differ in the head.
        """
        kept = self._kept
        self._trunk.forward = lambda *_, **__: kept
        try:
            outputs = self._model(**self._inputs, use_cache=False, logits_to_keep=rows)
        finally:
            del self._trunk.forward  # the class's own again
        return outputs.logits[0].float()

    def _keep(self, trunk: torch.nn.Module, arguments: Any, outputs: Any) -> None:
        self._kept = outputs

    @torch.inference_mode()
    def _examine(self, features: AttentionFeatures) -> tuple[ModelShape, int]:
        """Run three tokens and look at what the layers ask for: a model that bypasses the interface is refused."""
        config = self._model.config
        name = architecture_name(config)
        probe = _ProbeBackend(features)
        zeros = torch.zeros(3, dtype=torch.long, device=self.device)
        positions = torch.arange(3, device=self.device)
        try:
            logits = self.forward(zeros, positions, zeros[:1] + 2, probe)
        except AttentionNotSupported as error:
            raise UnsupportedModelError(name, str(error)) from error
        announced = shape_from_config(config)
        if probe.unsupported:
            raise UnsupportedModelError(name, f"the attention backend does not implement {probe.unsupported[0]}")
        if probe.layers != list(range(announced.num_layers)):
            raise UnsupportedModelError(name, "not every layer attends once through the attention interface")
        if probe.shapes != {(announced.num_kv_heads, announced.head_size, announced.head_size)}:
            raise UnsupportedModelError(name, "its layers differ in the size or number of key and value heads")
        layer_types = getattr(config, "layer_types", None)
        for layer, window in enumerate(probe.windows):
            if layer_types is not None and (layer_types[layer] == "sliding_attention") != (window is not None):
                raise UnsupportedModelError(name, f"layer {layer} does not state its sliding window")
        if layer_types is None and getattr(config, "sliding_window", None) and not any(probe.windows):
            raise UnsupportedModelError(name, "its layers do not state their sliding window")
            if window is not None and window < 1:
                raise UnsupportedModelError(name, f"the sliding window of layer {layer} is {window}")
        # Weights may hold NaN, which equals nothing: each request is told so.
        if (
            logits.shape[0] != 1
            or self._trunk is self._model
            or not _are_same(self.logits_of(zeros[:1] + 2), logits)
        ):
            raise UnsupportedModelError(name, "it cannot compute the logits of chosen rows")
        return announced, logits.shape[1]


def _are_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


@dataclass(slots=True, eq=False)
class _ProbeBackend:
    """Notes what layers ask for and answers zeros."""

    features: AttentionFeatures
    name: str = "probe"
    unsupported: list[str] = field(default_factory=list)
    layers: list[int] = field(default_factory=list)
    shapes: set[tuple[int, int, int]] = field(default_factory=set)
    windows: list[int | None] = field(default_factory=list)

    def begin(self, batch: AttentionBatch) -> None:
        raise AssertionError("a probe runs no batch")

    def forward(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        asked = {"softcap": softcap, "sinks": sinks, "sliding_window": sliding_window}
        self.unsupported += [
            feature for feature, value in asked.items() if value is not None and not getattr(self.features, feature)
        ]
        self.layers.append(layer)
        self.shapes.add((key.shape[1], key.shape[2], value.shape[2]))
        self.windows.append(sliding_window)
        return torch.zeros_like(query)
