"""Tokens that a step has not told the host yet, for the step after it: which rows want them, and how they get there.

The host plans a decode before the token is known that it computes; the device puts it into the flat batch itself, in
its own order, from what it sampled last. Knows neither requests nor models.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from scheduler.outputs import PENDING_TOKEN_ID, ScheduledChunk
from worker.device import Device


@dataclass(slots=True, eq=False)
class DeviceTokens:
    """What the step before sampled: int64 `token_ids` on the device, and the place of each sequence's among them."""

    token_ids: torch.Tensor
    place_of: Mapping[int, int]


@dataclass(slots=True, eq=False)
class PendingTokens:
    """`places` in the flat batch that wait for the tokens of the sequences `seq_ids`."""

    places: list[int]
    seq_ids: list[int]

    def fill_in(self, input_ids: torch.Tensor, tokens: DeviceTokens, device: Device) -> None:
        """Launch it: int64 `input_ids` [T] holds no pending token for what is launched afterwards.

        A row for which there was no number to choose gets token 0: its request ends with the step before.
        """
        sources = device.upload([tokens.place_of[seq_id] for seq_id in self.seq_ids], torch.int64)
        places = device.upload(self.places, torch.int64)
        input_ids.index_copy_(0, places, tokens.token_ids.index_select(0, sources).clamp_(min=0))


def pending_tokens(chunks: list[ScheduledChunk]) -> PendingTokens:
    """Only a row of one token can be pending: prompts are known."""
    pending = PendingTokens([], [])
    place = 0
    for chunk in chunks:
        if chunk.token_ids[0] == PENDING_TOKEN_ID:
            pending.places.append(place)
            pending.seq_ids.append(chunk.seq_id)
        place += len(chunk.token_ids)
    return pending
