"""Explanations of all ingresses: bounded, found by id and alias, and those of running requests by asking around."""

from monitoring.explanation_store import QUESTION_S, ExplanationStore, StoredExplanation


def made(request_id: str, *aliases: str, size: int = 2) -> StoredExplanation:
    return {"id": request_id, "aliases": list(aliases), "tenant": "", "key_id": "", "text": "x" * size, "ended_s": 0.0}


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def ids(found: list[StoredExplanation]) -> list[str]:
    return [explanation["id"] for explanation in found]


def test_the_oldest_go_first_by_number_and_by_bytes():
    store = ExplanationStore(Clock(), max_explanations=3, max_bytes=100)
    store.put("i", [made(f"r{number}", "same") for number in range(5)], holds_requests=False)
    assert ids(store.find("i", "same")[0]) == ["r2", "r3", "r4"]
    store.put("i", [made("big", size=97)], holds_requests=False)
    assert len(store) == 2
    assert store.num_bytes == 99
    assert store.find("i", "r2") == ([], False)


def test_an_id_is_found_before_an_alias_that_somebody_chose_like_it():
    store = ExplanationStore(Clock())
    store.put("i", [made("a"), made("b", "a")], holds_requests=False)
    assert ids(store.find("i", "a")[0]) == ["a"]


def test_an_explanation_that_comes_again_takes_the_place_of_the_first():
    store = ExplanationStore(Clock())
    store.put("i", [made("a", "x"), made("a", "x", size=9)], holds_requests=False)
    assert (len(store), store.num_bytes, ids(store.find("i", "x")[0])) == (1, 9, ["a"])


def test_a_running_request_of_another_ingress_is_asked_for_with_its_next_report():
    clock = Clock()
    store = ExplanationStore(clock)
    assert store.find("one", "r") == ([], False), "nobody else holds requests"
    store.put("two", [], holds_requests=True)
    assert store.find("one", "r") == ([], True)
    assert store.put("two", [], holds_requests=True) == ["r"]
    store.answer("r", [made("r")])
    assert ids(store.find("one", "r")[0]) == ["r"]
    assert store.put("two", [], holds_requests=True) == []


def test_ingresses_that_fell_silent_and_old_questions_are_forgotten():
    clock = Clock()
    store = ExplanationStore(clock)
    store.put("two", [], holds_requests=True)
    assert store.find("one", "r") == ([], True)
    clock.now_s = QUESTION_S + 0.1
    assert store.find("one", "r") == ([], False)
    assert store.put("two", [], holds_requests=True) == []


def test_what_came_last_is_the_newest_and_ended_when_it_says():
    now_s = 100.0
    store = ExplanationStore(lambda: now_s)
    store.put("i", [made("a"), {**made("b"), "ended_s": 2.0}], holds_requests=False)
    store.put("i", [made("c")], holds_requests=False)
    assert ids(store.newest(2)) == ["c", "b"]
    assert store.newest(2)[1]["ended_s"] == 98.0
