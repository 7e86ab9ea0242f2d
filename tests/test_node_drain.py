"""Draining a node: what is asked, how long is waited, and what is said when it cannot be."""

from dataclasses import dataclass, field

import pytest

from deployments import node_drain
from deployments.node_drain import DrainError, drain, node_at


@dataclass
class FakeNodes:
    """One drain after the other; `left` is what runs there at each look, the last for ever."""

    addresses: dict[str, str] = field(default_factory=dict)
    left: list[list[str]] = field(default_factory=list)
    is_refused: bool = False
    drained: list[tuple[str, float]] = field(default_factory=list)

    def alive(self) -> dict[str, str]:
        return self.addresses

    def drain(self, node_id: str, deadline_s: float) -> None:
        if self.is_refused:
            raise DrainError("no")
        self.drained.append((node_id, deadline_s))

    def serve_actors(self, node_id: str) -> list[str]:
        assert self.drained, "looked before it asked"
        return self.left.pop(0) if len(self.left) > 1 else self.left[0]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_drain, "POLL_PERIOD_S", 0.01)


def test_it_waits_until_nothing_of_serve_is_left() -> None:
    nodes = FakeNodes(left=[["SERVE_REPLICA::a", "SERVE_PROXY_ACTOR-1"], ["SERVE_PROXY_ACTOR-1"], []])
    assert drain(nodes, "one", 30.0) == []
    assert nodes.drained == [("one", 30.0)]


def test_at_the_deadline_it_names_what_still_runs() -> None:
    nodes = FakeNodes(left=[["SERVE_REPLICA::a"]])
    assert drain(nodes, "one", 0.05) == ["SERVE_REPLICA::a"]


def test_a_refusal_is_not_waited_for() -> None:
    with pytest.raises(DrainError):
        drain(FakeNodes(is_refused=True, left=[["SERVE_REPLICA::a"]]), "one", 30.0)


def test_the_node_of_an_address_is_the_one_that_is_up_there() -> None:
    nodes = FakeNodes(addresses={"one": "10.0.0.1", "two": "10.0.0.2", "three": "10.0.0.2"})
    assert node_at(nodes, "10.0.0.1") == "one"
    with pytest.raises(DrainError, match="0 nodes are up"):
        node_at(nodes, "10.0.0.3")
    with pytest.raises(DrainError, match="2 nodes are up"):
        node_at(nodes, "10.0.0.2")
