"""Cosine and sine of rotary positions, each computed once. Knows neither tokens nor steps."""

import torch
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

#: positions of the first table; it doubles where a longer sequence comes
NUM_FIRST_POSITIONS = 1024


class RotaryTable:
    """Line p is of position p, `half` of a head's size numbers in float32. Grows and never shrinks.

    A step looks its angles up, since torch's cosine of even a few numbers may wait for a second thread.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        """Of a model whose frequencies stay as they are: see `family.STATIC_ROPE_TYPES`."""
        rotary = LlamaRotaryEmbedding(config)
        self._frequencies = rotary.inv_freq.float()
        self._scaling: float = rotary.attention_scaling
        self.cosine = self.sine = torch.empty(0, len(self._frequencies))
        self.reach(NUM_FIRST_POSITIONS)

    def reach(self, num_positions: int) -> None:
        """Hold positions below `num_positions`. The tables before stay valid as long as somebody keeps them."""
        size = len(self.cosine)
        while size < num_positions:
            new = max(size, NUM_FIRST_POSITIONS)
            angles = torch.arange(size, size + new).float()[:, None] * self._frequencies
            self.cosine = torch.cat([self.cosine, angles.cos() * self._scaling])
            self.sine = torch.cat([self.sine, angles.sin() * self._scaling])
            size += new
