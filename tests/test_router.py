"""Choice of a worker: what the registry knows, and how replicas are ranked."""

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.config import RequestRouterConfig

from deployments import router_state
from deployments.app import ROUTER
from deployments.router import BLOCK_SIZE_KEY, LoadRouter
from deployments.router_state import ReplicaWork, RouterState
from worker.types import EngineLoad, EngineRequest, SamplingParams

BLOCK_SIZE = 16


def load(*, running: int = 0, queued_tokens: int = 0, free_blocks: int = 1000) -> EngineLoad:
    return EngineLoad(0, running, 0, queued_tokens, free_blocks, 0)


@dataclass
class Replica:
    """As much of Serve's `RunningReplica` as a router looks at."""

    name: str
    replica_metadata: dict[str, Any] = field(default_factory=lambda: {BLOCK_SIZE_KEY: BLOCK_SIZE})

    @property
    def replica_id(self) -> SimpleNamespace:
        return SimpleNamespace(unique_id=self.name)


def pending(request_id: str, num_tokens: int = 10, **kwargs: Any) -> SimpleNamespace:
    request = EngineRequest(request_id, [1] * num_tokens, SamplingParams(max_tokens=1))
    return SimpleNamespace(
        args=[request], kwargs=kwargs, routing_context=SimpleNamespace(should_backoff=False)
    )


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> RouterState:
    """A registry of its own for each test, where the router looks for it."""
    fresh = RouterState()
    monkeypatch.setattr(router_state, "ROUTER_STATE", fresh)
    return fresh


@pytest.fixture
def router() -> LoadRouter:
    """Serve's own construction needs a cluster; what ranks replicas does not."""
    made = LoadRouter.__new__(LoadRouter)
    made.initialize_state()
    return made


def chosen(router: LoadRouter, replicas: list[Replica], asked: SimpleNamespace) -> list[str]:
    ranks = asyncio.run(router.choose_replicas(replicas, asked))  # type: ignore[arg-type]
    assert all(len(rank) == 1 for rank in ranks)
    return [rank[0].replica_id.unique_id for rank in ranks]


def test_the_replica_with_fewer_queued_tokens_comes_first(router: LoadRouter, state: RouterState):
    for request_id, replica_id, queued_tokens in (("x", "a", 5000), ("y", "b", 100)):
        state.open(request_id)
        state.book(request_id, replica_id, 1)
        state.report(request_id, replica_id, load(queued_tokens=queued_tokens))
    state.open("new")
    assert chosen(router, [Replica("a"), Replica("b")], pending("new")) == ["b", "a"]


def test_a_replica_without_room_for_the_prompt_comes_last(router: LoadRouter, state: RouterState):
    for request_id, replica_id, held in (("x", "a", load(free_blocks=3)), ("y", "b", load(running=20))):
        state.open(request_id)
        state.book(request_id, replica_id, 1)
        state.report(request_id, replica_id, held)
    state.open("long")
    state.open("short")
    replicas = [Replica("a"), Replica("b")]
    assert chosen(router, replicas, pending("long", num_tokens=4 * BLOCK_SIZE)) == ["b", "a"]
    assert chosen(router, replicas, pending("short", num_tokens=BLOCK_SIZE)) == ["a", "b"]


def test_sixty_four_requests_before_any_report_are_spread_evenly(router: LoadRouter, state: RouterState):
    replicas = [Replica("a"), Replica("b"), Replica("c"), Replica("d")]
    first_choices = []
    for number in range(64):
        state.open(f"r{number}")
        first_choices.append(chosen(router, replicas, pending(f"r{number}"))[0])
    assert {name: first_choices.count(name) for name in "abcd"} == {"a": 16, "b": 16, "c": 16, "d": 16}


def test_a_long_prompt_keeps_short_ones_away_until_it_is_reported(router: LoadRouter, state: RouterState):
    replicas = [Replica("a"), Replica("b")]
    state.open("long")
    busy = chosen(router, replicas, pending("long", num_tokens=4000))[0]
    others = []
    for number in range(10):
        state.open(f"r{number}")
        others.append(chosen(router, replicas, pending(f"r{number}"))[0])
    assert busy not in others


def test_equal_replicas_take_turns_while_requests_come_and_go(router: LoadRouter, state: RouterState):
    replicas = [Replica("a"), Replica("b")]
    choices = []
    for number in range(6):
        state.open(f"r{number}")
        choices.append(chosen(router, replicas, pending(f"r{number}"))[0])
        state.close(f"r{number}")
    assert choices in (["a", "b"] * 3, ["b", "a"] * 3)


def test_a_pinned_call_goes_to_its_replica_whatever_its_load(router: LoadRouter, state: RouterState):
    replicas = [Replica("a"), Replica("b")]
    state.open("x")
    state.book("x", "b", 100_000)
    assert chosen(router, replicas, pending("x", target_replica="b")) == ["b"]


def test_a_pinned_call_whose_replica_is_gone_is_still_routed(router: LoadRouter, state: RouterState):
    assert len(chosen(router, [Replica("a"), Replica("b")], pending("x", target_replica="gone"))) == 2


def test_every_choice_asks_serve_to_back_off(router: LoadRouter, state: RouterState):
    asked = pending("x")
    chosen(router, [Replica("a")], asked)
    assert asked.routing_context.should_backoff


def test_calls_that_are_no_requests_go_round_and_are_not_booked(router: LoadRouter, state: RouterState):
    asked = SimpleNamespace(args=[], kwargs={}, routing_context=SimpleNamespace(should_backoff=False))
    firsts = [chosen(router, [Replica("a"), Replica("b")], asked)[0] for _ in range(4)]
    assert firsts in (["a", "b"] * 2, ["b", "a"] * 2)
    assert state.work("a") == state.work("b") == ReplicaWork()


def test_the_booking_follows_where_serve_sent_the_request(router: LoadRouter, state: RouterState):
    state.open("x")
    asked = pending("x", num_tokens=7)
    first, second = chosen(router, [Replica("a"), Replica("b")], asked)
    router.on_request_routed(asked, SimpleNamespace(unique_id=second), None)  # type: ignore[arg-type]
    assert state.work(first) == ReplicaWork()
    assert state.work(second) == ReplicaWork(None, 1, 7)


def test_a_report_takes_the_place_of_the_booking(state: RouterState):
    state.open("x")
    state.book("x", "a", 7)
    assert state.work("a") == ReplicaWork(None, 1, 7)
    state.report("x", "a", load(running=1))
    assert state.work("a") == ReplicaWork(load(running=1), 0, 0)


def test_booking_a_reported_request_again_changes_nothing(state: RouterState):
    state.open("x")
    state.book("x", "a", 7)
    state.report("x", "a", load(running=1))
    state.book("x", "a", 7)
    assert state.work("a").num_booked_requests == 0


def test_the_last_stream_takes_the_report_along(state: RouterState):
    for request_id in ("x", "y"):
        state.open(request_id)
        state.book(request_id, "a", 7)
    state.report("x", "a", load(running=2))
    state.close("x")
    assert state.work("a").load == load(running=2)
    state.close("y")
    assert state.work("a") == ReplicaWork()
    assert state.num_open_requests == 0


def test_a_booking_after_the_end_leaves_nothing_behind(state: RouterState):
    state.open("x")
    state.close("x")
    state.book("x", "a", 7)
    state.report("x", "a", load())
    state.close("x")
    assert state.work("a") == ReplicaWork()


def test_the_class_that_serve_rebuilds_from_bytes_reads_the_same_registry(state: RouterState):
    rebuilt = RequestRouterConfig(request_router_class=ROUTER).get_request_router_class()  # type: ignore[arg-type]
    router = rebuilt.__new__(rebuilt)
    router.initialize_state()
    state.open("x")
    first = chosen(router, [Replica("a"), Replica("b")], pending("x", num_tokens=7))[0]
    assert state.work(first) == ReplicaWork(None, 1, 7)


def test_a_silent_replica_comes_last_until_it_reports_or_time_has_passed(
    router: LoadRouter, monkeypatch: pytest.MonkeyPatch
):
    now_s = 100.0
    state = RouterState(clock=lambda: now_s)
    monkeypatch.setattr(router_state, "ROUTER_STATE", state)
    replicas = [Replica("a"), Replica("b")]
    for request_id, replica_id in (("busy", "b"), ("silent", "a")):
        state.open(request_id)
        state.book(request_id, replica_id, 1)
    state.report("busy", "b", load(running=50))
    state.suspect("silent")
    state.open("new")
    assert chosen(router, replicas, pending("new"))[0] == "b"

    state.report("silent", "a", load())
    assert chosen(router, replicas, pending("new"))[0] == "a"

    state.suspect("silent")
    assert chosen(router, replicas, pending("new"))[0] == "b"
    now_s += router_state.SUSPICION_S
    assert chosen(router, replicas, pending("new"))[0] == "a"
