"""`ModelFacts`: what the ingress must know of the model that the workers run."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Read from a loaded engine. `generation_defaults` are the model's own sampling defaults."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    block_size: int
    num_device_blocks: int
    num_host_blocks: int
    generation_defaults: dict[str, Any] = field(default_factory=dict)
