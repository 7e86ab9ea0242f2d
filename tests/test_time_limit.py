"""Code that takes too long ends, whatever it does; code that does not never sees the limit; and templates have one."""

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.tiny_tokenizers import folder_of
from worker.text import ChatTemplateError, Tokenizer
from worker.text import chat as chat_module
from worker.text.chat import ChatTemplate
from worker.text.time_limit import TimeLimit, TimeLimitExceeded

LIMIT_S = 0.05


def spin(seconds: float) -> None:
    ends_s = time.monotonic() + seconds
    while time.monotonic() < ends_s:
        with contextlib.suppress(Exception):  # what is to be ended may catch all of its own errors
            sum(range(100))


def test_what_takes_too_long_ends_and_what_comes_after_it_does_not() -> None:
    limit = TimeLimit(LIMIT_S)
    for _ in range(3):
        began_s = time.monotonic()
        with pytest.raises(TimeLimitExceeded):
            limit.run(lambda: spin(20.0))
        assert time.monotonic() - began_s < 5.0
        assert limit.run(lambda: 7) == 7
    spin(3 * LIMIT_S)  # outside of any run


def test_results_and_errors_of_what_is_in_time_pass() -> None:
    limit = TimeLimit(20.0)
    assert limit.run(lambda: "result") == "result"
    with pytest.raises(ZeroDivisionError):
        limit.run(lambda: 1 // 0)


def test_runs_that_end_about_when_their_time_does_never_leave_an_exception_behind() -> None:
    """The race between the one that ends a run and the run's own end, many times over on several threads."""
    limit = TimeLimit(0.002)

    def race(number: int) -> str:
        outcome = "in time"
        try:
            try:
                limit.run(lambda: spin(0.0016 + 0.0002 * (number % 5)))
            except TimeLimitExceeded:
                outcome = "too late"
            spin(0.001)
        except TimeLimitExceeded:
            outcome = "left behind"
        return outcome

    with ThreadPoolExecutor(4) as threads:
        outcomes = list(threads.map(race, range(400)))
    assert set(outcomes) <= {"in time", "too late"}
    assert "too late" in outcomes


def test_the_watching_thread_ends_with_its_limit() -> None:
    def watchers() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "time-limit"}

    before = watchers()
    limit = TimeLimit(0.01)
    limit.run(lambda: None)
    (watcher,) = watchers() - before
    del limit
    watcher.join(2.0)
    assert not watcher.is_alive()


ENDLESS = [
    "{% for a in range(90000) %}{% for b in range(90000) %}{% for c in range(90000) %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% set all = range(900) | list %}{% for a in all %}{% for b in all %}{% for c in all %}{% for d in all %}"
    "{% endfor %}{% endfor %}{% endfor %}{% endfor %}",
]


@pytest.mark.parametrize("template", ENDLESS)
def test_a_template_that_would_run_for_years_is_given_up_and_the_next_one_serves(template: str) -> None:
    tokenizer = Tokenizer(folder_of("byte_level"))
    endless = ChatTemplate(tokenizer._chat._wrapper, tokenizer._backend, template, render_limit_s=0.2)
    began_s = time.monotonic()
    with pytest.raises(ChatTemplateError, match=r"ran for more than 0\.2 s"):
        endless.encode([{"role": "user", "content": "a"}])
    assert time.monotonic() - began_s < 10.0
    assert tokenizer.encode_chat([{"role": "user", "content": "a"}])


def test_a_template_cannot_write_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_module, "MAX_RENDERED_CHARS", 1000)
    tokenizer = Tokenizer(folder_of("byte_level"), "{% for a in range(1001) %}a{% endfor %}")
    with pytest.raises(ChatTemplateError, match="more than 1000 characters"):
        tokenizer.encode_chat([{"role": "user", "content": "a"}])
