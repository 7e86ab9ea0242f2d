"""The order of swaps that run beside the forward passes: which piece of staging memory takes a move, and what waits
for what. Knows ids, lanes and marks; it holds no memory and moves nothing itself.

Blocks of the device are read and written in the compute lane alone, in the order of the forward passes, so that no
pass meets half a block, and blocks of the host in the transfer lane alone. Between them lies staging memory: a pass
that overwrites a block which was swapped out waits until it was copied within the device, never for the host.
"""

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

BlockPairs = list[tuple[int, int]]
Work = Callable[[], None]
Mark = TypeVar("Mark")


class Lane(Protocol[Mark]):
    """Work of the device that runs in the order in which it was given, some time after it was given."""

    def run(self, work: Work) -> None: ...

    def mark(self) -> Mark:
        """The point after everything given so far."""
        ...

    def wait(self, mark: Mark) -> None:
        """What is given from now on runs after that point of any lane. The host goes on at once."""
        ...


class Mover(Protocol):
    """Moves blocks through a slot of the staging memory; the n-th of a list of ids lies at its n-th place."""

    def gather(self, slot: int, device_ids: list[int]) -> Work:
        """From blocks of the device."""
        ...

    def unload(self, slot: int, host_ids: list[int]) -> Work:
        """To blocks of the host."""
        ...

    def load(self, slot: int, host_ids: list[int]) -> Work:
        """From blocks of the host."""
        ...

    def scatter(self, slot: int, device_ids: list[int]) -> Work:
        """To blocks of the device."""
        ...

    def copy(self, pairs: BlockPairs) -> Work:
        """(device, device), through no slot."""
        ...


class StagedSwap(Generic[Mark]):
    """Takes the slots in turn. Whoever takes one waits, in its own lane, until the move before has left it."""

    def __init__(
        self, compute: Lane[Mark], transfer: Lane[Mark], mover: Mover, num_slots: int, num_slot_blocks: int
    ) -> None:
        self._compute = compute
        self._transfer = transfer
        self._mover = mover
        self._num_slot_blocks = num_slot_blocks
        self._left: list[Mark | None] = [None] * num_slots
        self._next_slot = 0

    def swap_out(self, pairs: BlockPairs) -> None:
        """(device, host). A pass launched afterwards may overwrite the device's blocks."""
        for device_ids, host_ids in self._pieces(pairs, by=1):
            slot = self._take_slot(self._compute)
            self._compute.run(self._mover.gather(slot, device_ids))
            self._transfer.wait(self._compute.mark())
            self._transfer.run(self._mover.unload(slot, host_ids))
            self._left[slot] = self._transfer.mark()

    def swap_in(self, pairs: BlockPairs) -> None:
        """(host, device). A pass launched afterwards reads the device's blocks as they were swapped out."""
        for host_ids, device_ids in self._pieces(pairs, by=0):
            slot = self._take_slot(self._transfer)
            self._transfer.run(self._mover.load(slot, host_ids))
            self._compute.wait(self._transfer.mark())
            self._compute.run(self._mover.scatter(slot, device_ids))
            self._left[slot] = self._compute.mark()

    def copy(self, pairs: BlockPairs) -> None:
        """(device, device)."""
        self._compute.run(self._mover.copy(pairs))

    def join(self) -> None:
        """What is given to the compute lane from now on runs after all moves."""
        self._compute.wait(self._transfer.mark())

    def _take_slot(self, lane: Lane[Mark]) -> int:
        slot = self._next_slot
        self._next_slot = (slot + 1) % len(self._left)
        left = self._left[slot]
        if left is not None:
            lane.wait(left)
        return slot

    def _pieces(self, pairs: BlockPairs, by: int) -> list[tuple[list[int], list[int]]]:
        """As much as fits into a slot at a time, sorted by the host's ids so that neighbours move together."""
        ordered = sorted(pairs, key=lambda pair: pair[by])
        size = self._num_slot_blocks
        pieces = [ordered[first : first + size] for first in range(0, len(ordered), size)]
        return [([source for source, _ in piece], [destination for _, destination in piece]) for piece in pieces]


def runs_of(ids: list[int]) -> list[tuple[int, int, int]]:
    """(place, first id, length) of each run of ids that follow each other: [7, 8, 3] → [(0, 7, 2), (2, 3, 1)]."""
    runs: list[tuple[int, int, int]] = []
    for place, block in enumerate(ids):
        if runs and block == runs[-1][1] + runs[-1][2]:
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((place, block, 1))
    return runs
