"""The queues of sequence groups, each in the shared order: policy key, then arrival."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Protocol

from scheduler.fairness import FairShare
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


class WaitingQueue(Protocol):
    """Groups without blocks: new ones and recomputed ones. `head` is who is to be admitted next."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[SequenceGroup]: ...
    def add(self, group: SequenceGroup) -> None: ...
    def remove(self, group: SequenceGroup) -> None: ...
    @property
    def head(self) -> SequenceGroup | None: ...
    @property
    def first_preempted(self) -> SequenceGroup | None: ...


class OrderedWaitingQueue:
    """`fcfs` and `priority`: new and recomputed groups alike by their static key."""

    def __init__(self) -> None:
        self._all = GroupQueue()
        self._preempted = GroupQueue()

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[SequenceGroup]:
        return iter(self._all)

    def add(self, group: SequenceGroup) -> None:
        self._all.add(group)
        if group.num_preemptions:
            self._preempted.add(group)

    def remove(self, group: SequenceGroup) -> None:
        self._all.remove(group)
        if group.num_preemptions:
            self._preempted.remove(group)

    @property
    def head(self) -> SequenceGroup | None:
        return self._all.head

    @property
    def first_preempted(self) -> SequenceGroup | None:
        """The oldest recomputed group."""
        return self._preempted.head


class FairWaitingQueue:
    """`fair`: recomputed groups first, then the first request of the tenant that was served least."""

    def __init__(self, share: FairShare) -> None:
        self._share = share
        self._preempted = GroupQueue()
        self._new: dict[str, GroupQueue] = {}

    def __len__(self) -> int:
        return len(self._preempted) + sum(map(len, self._new.values()))

    def __iter__(self) -> Iterator[SequenceGroup]:
        yield from self._preempted
        for tenant in sorted(self._new, key=self._share.counter):
            yield from self._new[tenant]

    def add(self, group: SequenceGroup) -> None:
        if group.num_preemptions:
            self._preempted.add(group)
            return
        if group.tenant not in self._new:
            self._share.lift(group.tenant, list(self._new))
            self._new[group.tenant] = GroupQueue()
        self._new[group.tenant].add(group)

    def remove(self, group: SequenceGroup) -> None:
        if group.num_preemptions:
            self._preempted.remove(group)
            return
        own = self._new[group.tenant]
        own.remove(group)
        if not own:
            del self._new[group.tenant]

    @property
    def head(self) -> SequenceGroup | None:
        if (preempted := self._preempted.head) is not None:
            return preempted
        if not self._new:
            return None
        tenant = min(self._new, key=self._share.counter)
        return self._new[tenant].head

    @property
    def first_preempted(self) -> SequenceGroup | None:
        """The oldest recomputed group."""
        return self._preempted.head


class Queues:
    """`waiting` holds groups without blocks, `running` those with device blocks, `swapped` those on the host.

    Running groups decode or are mid-way through their prompt.
    """

    __slots__ = ("num_queued_tokens", "running", "swapped", "waiting")

    def __init__(self, waiting: WaitingQueue) -> None:
        self.waiting = waiting
        self.running = GroupQueue()
        self.swapped = GroupQueue()
        #: tokens that the groups of `waiting` and `swapped` have left to compute; they do not advance while there
        self.num_queued_tokens = 0

    @property
    def is_empty(self) -> bool:
        return not len(self.waiting) and not self.running and not self.swapped

    def wait(self, group: SequenceGroup) -> None:
        self.waiting.add(group)
        self.num_queued_tokens += group.num_uncomputed_tokens

    def stop_waiting(self, group: SequenceGroup) -> None:
        self.waiting.remove(group)
        self.num_queued_tokens -= group.num_uncomputed_tokens

    def park(self, group: SequenceGroup) -> None:
        """The group's cache is on the host."""
        self.swapped.add(group)
        self.num_queued_tokens += group.num_uncomputed_tokens

    def unpark(self, group: SequenceGroup) -> None:
        self.swapped.remove(group)
        self.num_queued_tokens -= group.num_uncomputed_tokens
