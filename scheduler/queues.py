"""The three queues of sequence groups, each in the shared order: policy key, then arrival."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from scheduler.sequence import OrderKey, SequenceGroup


def _order(group: SequenceGroup) -> OrderKey:
    return group.order


class GroupQueue:
    """Groups in their shared order, oldest first. Adding and removing cost O(log n) comparisons."""

    def __init__(self) -> None:
        self._groups: list[SequenceGroup] = []

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[SequenceGroup]:
        return iter(self._groups)

    def __getitem__(self, place: int) -> SequenceGroup:
        return self._groups[place]

    def snapshot(self) -> list[SequenceGroup]:
        """The groups as they stand, to walk over while the queue changes."""
        return self._groups.copy()

    @property
    def head(self) -> SequenceGroup | None:
        return self._groups[0] if self._groups else None

    def add(self, group: SequenceGroup) -> None:
        if not self._groups or self._groups[-1].order < group.order:
            self._groups.append(group)
        else:
            insort(self._groups, group, key=_order)

    def remove(self, group: SequenceGroup) -> None:
        place = bisect_left(self._groups, group.order, key=_order)
        assert self._groups[place] is group
        del self._groups[place]

    def newest_first(self) -> Iterator[SequenceGroup]:
        return reversed(self._groups)


class IdleQueue(GroupQueue):
    """A queue whose groups do not advance while they are in it, so that their token count can be kept."""

    def __init__(self) -> None:
        super().__init__()
        self.num_uncomputed_tokens = 0

    def add(self, group: SequenceGroup) -> None:
        super().add(group)
        self.num_uncomputed_tokens += group.num_uncomputed_tokens

    def remove(self, group: SequenceGroup) -> None:
        super().remove(group)
        self.num_uncomputed_tokens -= group.num_uncomputed_tokens


class Queues:
    """`waiting` holds groups without blocks, `running` those with device blocks, `swapped` those on the host.

    Running groups decode or are mid-way through their prompt.
    """

    __slots__ = ("running", "swapped", "waiting")

    def __init__(self) -> None:
        self.waiting = IdleQueue()
        self.running = GroupQueue()
        self.swapped = IdleQueue()

    @property
    def is_empty(self) -> bool:
        return not self.waiting and not self.running and not self.swapped
