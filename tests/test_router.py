"""Choice of a worker: what the registry knows, and how replicas are ranked."""

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.config import RequestRouterConfig

from deployments import replica_view, router_state
from deployments.app import ROUTER
from deployments.prefix_index import PromptBlocks
from deployments.replica_view import ReplicaWork
from deployments.router import BLOCK_SIZE_KEY, MIN_SLOWNESS, NEAR_TOKENS, LoadRouter
from deployments.router_state import RouterState
from worker.types import EngineLoad, EngineRequest, SamplingParams

BLOCK_SIZE = 16


def load(
    *, running: int = 0, queued_tokens: int = 0, free_blocks: int = 1000, step_s: float = 0.0
) -> EngineLoad:
    return EngineLoad(0, running, 0, queued_tokens, free_blocks, 0, reference_step_s=step_s)


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


class Clock:
    """Stands still unless it is moved."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> RouterState:
    """A registry of its own for each test, where the router looks for it."""
    fresh = RouterState(clock)
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


def held(state: RouterState, replica_id: str) -> tuple[float, float]:
    work = state.work(replica_id)
    return work.num_queued_tokens, work.num_requests


def report(state: RouterState, replica_id: str, held: EngineLoad) -> None:
    """A stream of its own brings it."""
    request_id = f"reports {replica_id}"
    state.open(request_id)
    state.book(request_id, replica_id, 1)
    state.report(request_id, replica_id, held)


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
    # Another one follows, where the call is harmless: a target that does not answer must not hold up others' calls.
    assert chosen(router, replicas, pending("x", target_replica="b")) == ["b", "a"]


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
    assert state.work(first) == ReplicaWork(), "it was never there"
    assert held(state, second) == (7, 1)


def test_a_report_takes_the_place_of_the_booking(state: RouterState):
    state.open("x")
    state.book("x", "a", 7)
    assert held(state, "a") == (7, 1)
    state.report("x", "a", load(running=1, free_blocks=9))
    assert held(state, "a") == (0, 1)
    assert state.work("a", BLOCK_SIZE).num_free_tokens == 9 * BLOCK_SIZE


def test_booking_a_reported_request_again_changes_nothing(state: RouterState):
    state.open("x")
    state.book("x", "a", 7)
    state.report("x", "a", load(running=1))
    state.book("x", "a", 7)
    assert state.work("a").num_requests == 1


def test_what_is_known_of_a_replica_ages_until_it_is_renewed(state: RouterState, clock: Clock):
    state.open("x")
    state.open("y")
    state.book("x", "a", 7)
    state.report("x", "a", load(running=2, queued_tokens=100))
    state.close("x")
    state.book("y", "a", 50)
    seen = []
    for _ in range(4):
        seen.append((state.work("a").num_queued_tokens, state.work("a").num_requests))
        clock.now_s += replica_view.FRESH_S
        if len(seen) == 2:
            clock.now_s = 100.0 + (replica_view.FRESH_S + replica_view.STALE_S) / 2
        elif len(seen) == 3:
            clock.now_s = 100.0 + replica_view.STALE_S
    assert seen == [(150, 3), (150, 3), (75, 1.5), (0, 0)]
    state.close("y")
    assert state.num_open_requests == 0


def test_a_replica_that_left_is_forgotten_with_its_last_stream(state: RouterState):
    state.open("x")
    state.book("x", "a", 7)
    state.report("x", "a", load(running=2))
    state.replicas_changed({"b"}, {"a"})
    assert state.work("a").num_requests == 2
    state.close("x")
    assert state.work("a") == ReplicaWork()


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
    assert held(state, first) == (7, 1)


def test_a_silent_replica_comes_last_until_it_reports_or_time_has_passed(
    router: LoadRouter, state: RouterState, clock: Clock
):
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
    state.close("silent")
    assert chosen(router, replicas, pending("new"))[0] == "b"
    clock.now_s += replica_view.SUSPICION_S
    state.report("busy", "b", load(running=50))
    assert chosen(router, replicas, pending("new"))[0] == "a"


def test_a_replica_that_holds_requests_and_says_nothing_comes_last_before_any_stream_gives_up(
    router: LoadRouter, state: RouterState, clock: Clock
):
    replicas = [Replica("a"), Replica("b")]
    report(state, "b", load(running=30))
    state.open("x")
    assert chosen(router, replicas, pending("x"))[0] == "a"
    state.report("x", "a", load(running=1))
    for _ in range(4):
        clock.now_s += replica_view.SILENCE_S / 3
        state.report("reports b", "b", load(running=30))
    state.open("y")
    assert chosen(router, replicas, pending("y")) == ["b", "a"]
    state.report("x", "a", load(running=1))
    state.open("z")
    assert chosen(router, replicas, pending("z")) == ["a", "b"]


def test_a_replica_that_nobody_has_asked_for_long_is_not_silent(router: LoadRouter, state: RouterState, clock: Clock):
    report(state, "a", load())
    state.close("reports a")
    clock.now_s += 1000.0
    assert not state.work("a").is_suspect
    state.open("x")
    state.book("x", "a", 10)
    assert not state.work("a").is_suspect
    # More and more requests do not make up for the first, which it has not spoken of.
    for number in range(10):
        clock.now_s += replica_view.SILENCE_S / 8
        state.open(f"r{number}")
        state.book(f"r{number}", "a", 10)
    assert state.work("a").is_suspect


def test_a_slow_worker_counts_as_having_more_to_do(router: LoadRouter, state: RouterState):
    replicas = [Replica("slow"), Replica("fast")]
    report(state, "slow", load(running=2, step_s=0.08))
    report(state, "fast", load(running=6, step_s=0.02))
    state.open("new")
    assert chosen(router, replicas, pending("new"))[0] == "fast"


def test_a_worker_that_is_foreseen_to_be_hopelessly_slow_still_gets_some_requests(
    router: LoadRouter, state: RouterState
):
    """It may be a hiccup, and only requests can show that."""
    replicas = [Replica("a"), Replica("b")]
    report(state, "a", load(step_s=0.02))
    report(state, "b", load(step_s=8.0))
    choices = []
    for number in range(100):
        state.open(f"r{number}")
        choices.append(chosen(router, replicas, pending(f"r{number}"))[0])
        state.report(f"r{number}", choices[-1], load(step_s=0.02 if choices[-1] == "a" else 8.0))
    assert 5 <= choices.count("b") <= 15


def test_small_differences_of_measured_speed_do_not_count(router: LoadRouter, state: RouterState):
    replicas = [Replica("a"), Replica("b")]
    report(state, "a", load(running=6, step_s=0.02 * MIN_SLOWNESS * 0.99))
    report(state, "b", load(running=7, step_s=0.02))
    state.open("new")
    assert chosen(router, replicas, pending("new"))[0] == "a"


# --- cached prefixes


def prompt(name: str, num_blocks: int = 60) -> PromptBlocks:
    return PromptBlocks([f"{name}{number}".encode() for number in range(num_blocks)], BLOCK_SIZE)


def open_prompt(state: RouterState, request_id: str, name: str = "shared ") -> SimpleNamespace:
    state.open(request_id, blocks=prompt(name))
    return pending(request_id, num_tokens=60 * BLOCK_SIZE + 5)


def test_a_prompt_goes_where_its_beginning_was_sent_before(router: LoadRouter, state: RouterState):
    replicas = [Replica("a"), Replica("b"), Replica("c")]
    first = chosen(router, replicas, open_prompt(state, "first"))[0]
    state.report("first", first, load(running=1))
    again = chosen(router, replicas, open_prompt(state, "again"))[0]
    other = chosen(router, replicas, open_prompt(state, "other", "another "))[0]
    assert again == first != other
    assert state.accepted("first", first) == "load"
    assert state.accepted("again", first) == "prefix"
    # Only what has to be computed is booked.
    assert state.work(first).num_queued_tokens == 5


def test_a_cached_prefix_does_not_outweigh_more_work_than_it_saves(router: LoadRouter, state: RouterState):
    replicas = [Replica("a"), Replica("b")]
    first = chosen(router, replicas, open_prompt(state, "first"))[0]
    state.report("first", first, load(running=1, queued_tokens=2000))
    again = chosen(router, replicas, open_prompt(state, "again"))[0]
    assert again != first
    assert state.accepted("again", again) == "load"


def test_a_cached_prefix_is_worth_waiting_behind_about_one_prompt_more(router: LoadRouter, state: RouterState):
    """Computing it again would delay who comes later, and take the place of blocks that others use."""
    replicas = [Replica("a"), Replica("b")]
    first = chosen(router, replicas, open_prompt(state, "first"))[0]
    # What was sent there lately counts as well as what is queued.
    state.report("first", first, load(running=1, queued_tokens=700))
    assert chosen(router, replicas, open_prompt(state, "again"))[0] == first


def test_of_workers_as_good_as_each_other_the_one_that_holds_the_prefix_is_chosen(
    router: LoadRouter, state: RouterState
):
    replicas = [Replica("a"), Replica("b")]
    first = chosen(router, replicas, open_prompt(state, "first"))[0]
    other = "b" if first == "a" else "a"
    near = 2 * 965 + NEAR_TOKENS / 2
    recent = state.work(first)
    # As much that the other one looks a little better, and has not had a turn yet.
    ahead = near - recent.num_recent_tokens - 64 * (1 + recent.num_recent_requests) - 2 * 5
    state.report("first", first, load(running=1, queued_tokens=round(ahead)))
    scores = {score.replica.name: score.cost for score in router._scores(replicas, open_prompt(state, "again").args[0])}
    assert 0 < scores[first] - scores[other] < NEAR_TOKENS
    assert chosen(router, replicas, pending("again", num_tokens=965))[0] == first


def test_the_only_worker_is_chosen_for_that(router: LoadRouter, state: RouterState):
    chosen(router, [Replica("a")], open_prompt(state, "first"))
    assert state.accepted("first", "a") == "only"


def test_fewer_cached_tokens_than_foreseen_shorten_the_memory(router: LoadRouter, state: RouterState):
    for number in range(4):
        chosen(router, [Replica("a")], open_prompt(state, f"old {number}", f"old {number} "))
        state.first_token(f"old {number}", 0)
    chosen(router, [Replica("a")], open_prompt(state, "again", "old 2 "))
    # Its blocks had been evicted: then so were those that were last used before them.
    state.first_token("again", 0)
    held = []
    for number in range(4):
        state.open(f"probe {number}", blocks=prompt(f"old {number} "))
        held.append(state.num_cached_tokens(f"probe {number}", "a"))
    assert held == [0, 60 * BLOCK_SIZE, 60 * BLOCK_SIZE, 60 * BLOCK_SIZE]


def test_a_prompt_that_is_still_being_computed_is_no_wrong_foresight(router: LoadRouter, state: RouterState):
    for request_id, name in (("old", "old "), ("one", "shared "), ("two", "shared ")):
        chosen(router, [Replica("a")], open_prompt(state, request_id, name))
    for request_id in ("old", "one", "two"):
        state.first_token(request_id, 0)
    state.open("probe", blocks=prompt("old "))
    assert state.num_cached_tokens("probe", "a") == 60 * BLOCK_SIZE


def test_the_memory_of_a_cache_is_no_larger_than_the_cache(router: LoadRouter, state: RouterState):
    for number in range(4):
        chosen(router, [Replica("a")], open_prompt(state, f"r{number}", f"p{number} "))
        state.report(f"r{number}", "a", load(free_blocks=150))
    held = [state.num_cached_tokens(f"r{number}", "a") // BLOCK_SIZE for number in range(4)]
    # The last blocks of the oldest prompt that is left went first.
    assert held == [0, 30, 60, 60]


# --- full queues, and replicas that leave


def test_a_replica_that_refused_a_request_comes_last_for_it_alone(router: LoadRouter, state: RouterState):
    replicas = [Replica("a"), Replica("b")]
    state.replicas_changed({"a", "b"}, set())
    state.open("x")
    first, second = chosen(router, replicas, pending("x"))
    assert state.avoid("x"), "one is left to ask"
    assert chosen(router, replicas, pending("x")) == [second, first]
    assert not state.avoid("x"), "both were asked"
    state.open("y")
    assert state.avoided("y") == frozenset()


def test_streams_are_told_when_their_replica_leaves(state: RouterState):
    told: list[str] = []
    for request_id, replica_id in (("x", "a"), ("y", "b"), ("z", "a")):
        state.open(request_id, on_left=lambda request_id=request_id: told.append(request_id))
        state.book(request_id, replica_id, 1)
    state.close("z")
    state.replicas_changed({"b"}, {"a"})
    assert told == ["x"]


def test_a_stream_that_reaches_a_replica_after_it_left_is_told_at_once(state: RouterState):
    told: list[str] = []
    state.replicas_changed({"b"}, {"a"})
    state.open("x", on_left=lambda: told.append("x"))
    state.accepted("x", "a")
    assert told == ["x"]


def test_replicas_that_left_are_not_remembered_for_ever(state: RouterState):
    for number in range(router_state.MAX_LEFT_REPLICAS + 10):
        state.replicas_changed((), {f"r{number}"})
    assert len(state._left_ids) == router_state.MAX_LEFT_REPLICAS
