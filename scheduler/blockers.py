"""Who stands in whose way: what each request took of steps in which others waited, and who held blocks and slots.

Owns bounded memories of both. Costs in proportion to the chunks of a step; who asks pays for what happened since.
Knows nothing of why anybody waits.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

#: requests whose chunks are remembered, and requests that held blocks and have given them back
MAX_REMEMBERED = 512

#: microseconds by kind of time, since the engine began
Clocks = Mapping[str, int]


@dataclass(slots=True, eq=False)
class Actor:
    """A request as others see it. `number` counts arrivals; it holds blocks for `num_tokens`, and `num_rows` slots.

    `charges`: by kind of time, the steps in which it took some, and how much up to each of them.
    """

    request_id: str
    tenant: str
    number: int
    priority: int
    num_tokens: int
    num_rows: int = 1
    last_step: int = -1
    charges: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)

    def charge(self, kind: str, us: int, step: int) -> None:
        if kind not in self.charges:
            self.charges[kind] = ([], [])
        steps, sums = self.charges[kind]
        total = (sums[-1] if sums else 0) + us
        if steps and steps[-1] == step:
            sums[-1] = total
        else:
            steps.append(step)
            sums.append(total)

    def charged_since(self, kind: str, step: int) -> int:
        """In the steps after `step`."""
        if kind not in self.charges:
            return 0
        steps, sums = self.charges[kind]
        place = bisect_right(steps, step)
        return sums[-1] - (sums[place - 1] if place else 0)


@dataclass(slots=True, eq=False)
class _Hold:
    """Blocks and slots in one pair of hands, from one state of the clocks to another (None: still)."""

    actor: Actor
    since: tuple[int, ...]
    since_step: int
    until: tuple[int, ...] | None = None
    until_step: int = 0


class Blockers:
    """`holding_kinds`: the kinds of time in which others wait for what is held."""

    def __init__(self, holding_kinds: tuple[str, ...]) -> None:
        self._kinds = holding_kinds
        self._recent: dict[str, Actor] = {}
        self._holds: dict[str, _Hold] = {}
        self._past_holds: deque[_Hold] = deque(maxlen=MAX_REMEMBERED)

    def charge(self, actor: Actor, kind: str, us: int, step: int) -> None:
        """`actor` took `us` of a step that others spent in time of this kind."""
        actor.charge(kind, us, step)
        if actor.last_step != step:
            actor.last_step = step
            self._recent.pop(actor.request_id, None)
            self._recent[actor.request_id] = actor
            if len(self._recent) > MAX_REMEMBERED:
                del self._recent[next(iter(self._recent))]

    def take_hold(self, actor: Actor, clocks: Clocks, step: int) -> None:
        if actor.request_id not in self._holds:
            self._holds[actor.request_id] = _Hold(actor, tuple(clocks[kind] for kind in self._kinds), step)

    def let_go(self, actor: Actor, clocks: Clocks, step: int) -> None:
        hold = self._holds.pop(actor.request_id, None)
        if hold is not None:
            hold.until = tuple(clocks[kind] for kind in self._kinds)
            hold.until_step = step
            self._past_holds.append(hold)

    def chargers(self, kind: str, since_step: int, limit_us: int, but: Actor) -> list[tuple[Actor, int]]:
        """Who took time of this kind after `since_step`, and how much; `limit_us` in all."""
        found: list[tuple[Actor, int]] = []
        for actor in reversed(self._recent.values()):
            if actor.last_step <= since_step:
                break
            if actor is not but and (us := actor.charged_since(kind, since_step)) > 0:
                found.append((actor, us))
        return within(found, limit_us)

    def holders(
        self, kind: str, since_us: int, since_step: int, total_us: int, but: Actor, *, is_slots: bool
    ) -> list[tuple[Actor, int]]:
        """Who held slots, or else blocks, while time of this kind passed, since its clock showed `since_us`.

        The `total_us` are divided by what each held and for how long of that time.
        """
        place = self._kinds.index(kind)
        weights: dict[str, tuple[Actor, int]] = {}

        def weigh(hold: _Hold, until_us: int) -> None:
            if hold.actor is not but and (us := until_us - max(hold.since[place], since_us)) > 0:
                actor = hold.actor
                _, known = weights.get(actor.request_id, (actor, 0))
                weights[actor.request_id] = (actor, known + us * (actor.num_rows if is_slots else actor.num_tokens))

        for hold in self._holds.values():
            weigh(hold, since_us + total_us)
        for hold in reversed(self._past_holds):
            if hold.until_step <= since_step:
                break
            assert hold.until is not None
            weigh(hold, hold.until[place])
        total = sum(weight for _, weight in weights.values())
        return [(actor, total_us * weight // total) for actor, weight in weights.values()]


def within(found: list[tuple[Actor, int]], limit_us: int) -> list[tuple[Actor, int]]:
    """Scaled down, where they sum to more than `limit_us`."""
    total = sum(us for _, us in found)
    if total <= limit_us:
        return found
    return [(actor, us * limit_us // total) for actor, us in found]


def split(found: list[tuple[Actor, int]], label: Callable[[Actor], str]) -> dict[str, list[tuple[Actor, int]]]:
    """By what they are called."""
    groups: dict[str, list[tuple[Actor, int]]] = {}
    for actor, us in found:
        groups.setdefault(label(actor), []).append((actor, us))
    return groups
