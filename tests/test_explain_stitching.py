"""What an ingress saw of a request and what its workers told become parts that sum to the whole, whatever happened."""

from deployments.explain.explanation import MASK, explanation_of, shown_to
from deployments.explain.journey import Journey
from deployments.explain.stitching import stitched
from deployments.frames import Accepted, Tokens
from deployments.keys import Caller
from scheduler.life_report import Blocker, LifePart, LifeReport
from tests.fake_worker import LOAD
from worker.types import TokenEvent


class Trip:
    """A journey on a clock that the test moves; `ms` are added to it before each thing that happens."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.journey = Journey("r", 100.0, 7, clock=lambda: self.now_s)

    def wait(self, ms: float) -> "Trip":
        self.now_s += ms / 1000
        return self

    def sent(self, ms: float, request_id: str = "r") -> "Trip":
        self.wait(ms)
        if not self.journey.attempts:
            self.journey.begin()
        self.journey.sent(request_id)
        return self

    def accepted(self, ms: float, worker: int = 0) -> "Trip":
        self.journey.asked()
        self.wait(ms).journey.received([Accepted(worker, f"replica-{worker}")])
        return self

    def tokens(self, ms: float, life: LifeReport | None = None) -> "Trip":
        self.journey.asked()
        self.wait(ms).journey.received([Tokens([TokenEvent("r", 0, [1], life=life)], LOAD)])
        return self

    def lost(self, ms: float, reason: str = "died") -> "Trip":
        self.wait(ms).journey.lost(reason)
        return self

    def ended(self, ms: float, status: str = "stop") -> "Trip":
        self.wait(ms).journey.end(status)
        return self

    def parts(self) -> list[tuple[str, str, float]]:
        parts, total_us = stitched(self.journey)
        assert sum(part.us for part in parts) == total_us
        assert all(part.us > 0 for part in parts)
        return [(part.name, part.cause, part.us / 1000) for part in parts]


def life(*parts: tuple[str, str, float], is_over: bool = True) -> LifeReport:
    made = [LifePart(name, cause, round(ms * 1000)) for name, cause, ms in parts]
    return LifeReport(sum(part.us for part in made), made, 7, is_over=is_over)


def test_the_way_to_the_ingress_is_no_tokenizing():
    trip = Trip()
    trip.journey.caller = Caller(read_s=trip.now_s + 0.004)
    trip.sent(6).accepted(1).tokens(5, life(("decode", "", 5))).ended(0)
    assert trip.parts()[:3] == [("transport", "request", 4), ("tokenize", "", 2), ("route", "", 1)]


def test_an_undisturbed_request_has_every_part_in_its_order():
    trip = Trip().sent(2).accepted(3).tokens(40)
    trip.tokens(60, life(("queue", "blocks", 20), ("prefill", "", 10), ("decode", "", 68))).ended(1)
    assert trip.parts() == [
        ("tokenize", "", 2),
        ("route", "", 3),
        ("queue", "blocks", 20),
        ("prefill", "", 10),
        ("decode", "", 68),
        ("transport", "", 2),
        ("deliver", "", 1),
    ]


def test_a_worker_that_began_before_its_word_was_here_takes_that_time_from_the_way_to_it():
    trip = Trip().sent(2).accepted(3).tokens(10, life(("decode", "", 11))).ended(1)
    assert trip.parts() == [("tokenize", "", 2), ("route", "", 2), ("decode", "", 11), ("deliver", "", 1)]


def test_what_a_worker_did_after_the_answer_was_over_is_no_part_of_it():
    trip = Trip().sent(1).accepted(1).tokens(10).ended(2)
    trip.journey.attempts[0].life = life(("prefill", "", 4), ("decode", "", 30))
    assert trip.parts() == [
        ("tokenize", "", 1),
        ("route", "", 1),
        ("prefill", "", 4),
        ("decode", "", 6),
        ("deliver", "", 2),
    ]


def test_frames_that_had_waited_for_a_slow_reader_are_delivery():
    trip = Trip().sent(1).accepted(1).wait(50)
    trip.tokens(0, life(("decode", "", 10))).ended(5)
    assert trip.parts()[-2:] == [("deliver", "", 40), ("deliver", "", 5)]


def test_a_lost_worker_keeps_what_it_delivered_and_the_failover_has_the_rest():
    trip = Trip().sent(1).accepted(1).tokens(20, life(("queue", "blocks", 15), ("prefill", "", 4), is_over=False))
    trip.tokens(30).lost(500, "stalled")
    trip.sent(0, "r~1").accepted(3, 1).tokens(9, life(("prefill", "", 4), ("decode", "", 5))).ended(1)
    assert trip.parts() == [
        ("tokenize", "", 1),
        ("route", "", 1),
        ("queue", "blocks", 15),
        ("prefill", "", 4),
        ("decode", "on_a_lost_worker", 31),
        ("failover", "stalled", 500),
        ("failover", "route", 3),
        ("prefill", "failover", 4),
        ("decode", "", 5),
        ("deliver", "", 1),
    ]


def test_a_worker_lost_before_its_first_token_has_cost_all_of_its_time():
    trip = Trip().sent(1).accepted(1).lost(80).sent(20, "r~1").accepted(2, 1)
    trip.tokens(5, life(("decode", "", 5))).ended(0.5)
    assert trip.parts()[1:4] == [("failover", "died", 81), ("failover", "died", 20), ("failover", "route", 2)]


def test_a_request_that_no_worker_took_was_on_its_way_and_one_that_failed_sums_too():
    assert Trip().sent(1).ended(30, "error").parts() == [("tokenize", "", 1), ("route", "", 30)]
    assert Trip().sent(1).accepted(1).lost(8).ended(100, "error").parts()[-1] == ("failover", "died", 100)
    unknown = Trip().sent(1).accepted(1).tokens(50).ended(1).parts()
    assert ("other", "unknown", 50) in unknown


def test_a_running_request_is_on_its_worker_up_to_now():
    trip = Trip().sent(1).accepted(1).wait(30)
    trip.journey.attempts[0].life = life(("queue", "token_budget", 29), is_over=False)
    assert trip.parts() == [("tokenize", "", 1), ("route", "", 1), ("queue", "token_budget", 29), ("transport", "", 1)]
    assert explanation_of(trip.journey)["status"] == "running"


def test_other_tenants_requests_have_no_name_for_those_who_are_no_admins():
    trip = Trip().sent(1).accepted(1)
    waited = LifePart("queue", "blocks", 9000, [Blocker("a~1", "mine", 5000), Blocker("b", "theirs", 3000)], 1000)
    trip.tokens(9, LifeReport(9000, [waited], 7, is_over=True)).ended(1)
    explanation = explanation_of(trip.journey)

    def blockers(caller: Caller | None) -> list[dict[str, object]]:
        (part,) = [part for part in shown_to(explanation, caller)["parts"] if part["name"] == "queue"]
        assert part["others_ms"] == 1
        return part["blockers"]

    assert blockers(None) == [{"id": "a", "ms": 5}, {"id": "b", "ms": 3}]
    assert blockers(Caller("mine")) == [{"id": "a", "ms": 5}, {"id": MASK, "ms": 3}]
    assert blockers(Caller()) == [{"id": MASK, "ms": 5}, {"id": MASK, "ms": 3}]
