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
    #: what one block holds of all layers; 0: not known
    num_block_bytes: int = 0
    #: as measured at start, to the host and back; 0.0: there are no blocks on the host
    swap_out_bytes_per_s: float = 0.0
    swap_in_bytes_per_s: float = 0.0
    generation_defaults: dict[str, Any] = field(default_factory=dict)
    #: the one chosen; empty: not known
    attention_backend: str = ""
