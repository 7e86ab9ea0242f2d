"""The engine's thread: what it delivers, and whom it survives."""

import threading
import time
from random import Random

import pytest

from tests.steppable_engine import request, running, slowly, wait_until

LONG = 50


def test_an_answer_arrives_token_by_token_and_ends_once() -> None:
    with running() as run:
        run.loop.submit(request("a", max_tokens=6))
        assert run.mailbox.wait_for_end("a").finish_reason == "length"
        assert run.mailbox.tokens("a") == [10, 11, 12, 13, 14, 15]


def test_all_events_of_a_step_are_delivered_in_one_call() -> None:
    gate = threading.Event()
    with running(lambda number: gate.wait(10.0) and None) as run:
        for number in range(6):
            run.loop.submit(request(f"r{number}", max_tokens=5))
        gate.set()
        for number in range(6):
            run.mailbox.wait_for_end(f"r{number}")
        assert len(run.mailbox.deliveries) <= run.engine.num_steps
        assert max(len(events) for events in run.mailbox.deliveries) >= 5
        for events in run.mailbox.deliveries:
            assert len({event.request_id for event in events}) == len(events)


def test_two_consumers_of_concurrent_answers_lose_no_token() -> None:
    # huggingface/transformers#40479
    with running(slowly) as run:

        def consume(name: str) -> None:
            for number in range(10):
                run.loop.submit(request(f"{name}{number}", max_tokens=20))
                run.mailbox.wait_for_end(f"{name}{number}")

        consumers = [threading.Thread(target=consume, args=(name,)) for name in ("a", "b")]
        for consumer in consumers:
            consumer.start()
        for consumer in consumers:
            consumer.join(20.0)
        for name in ("a", "b"):
            for number in range(10):
                assert run.mailbox.tokens(f"{name}{number}") == list(range(10, 30))


def test_a_refused_request_ends_alone_and_says_that_it_is_refused() -> None:
    with running(slowly) as run:
        run.loop.submit(request("good", max_tokens=20))
        run.loop.submit(request("too long", num_prompt_tokens=64))
        end = run.mailbox.wait_for_end("too long")
        assert (end.finish_reason, end.is_refusal) == ("error", True)
        assert end.error is not None
        assert "64 tokens" in end.error
        assert run.mailbox.wait_for_end("good").finish_reason == "length"
        assert run.mailbox.tokens("good") == list(range(10, 30))
        assert run.deaths == []


def test_a_refused_request_of_several_samples_ends_all_of_them_and_leaves_its_id_free() -> None:
    with running() as run:
        run.loop.submit(request("several", n=3))
        wait_until(lambda: len(run.mailbox.events("several")) == 3)
        assert [event.index for event in run.mailbox.events("several")] == [0, 1, 2]
        run.loop.submit(request("several", max_tokens=2))
        wait_until(lambda: run.mailbox.tokens("several") == [10, 11])


def test_a_request_id_that_is_open_cannot_be_opened_again() -> None:
    gate = threading.Event()
    with running(lambda number: gate.wait(10.0) and None) as run:
        run.loop.submit(request("a", max_tokens=3))
        with pytest.raises(ValueError, match="a is already open"):
            run.loop.submit(request("a"))
        gate.set()
        run.mailbox.wait_for_end("a")
        assert run.mailbox.tokens("a") == [10, 11, 12]


def test_an_aborted_answer_ends_and_gives_its_blocks_back() -> None:
    with running(slowly) as run:
        run.loop.submit(request("a", max_tokens=LONG))
        run.mailbox.wait_for_tokens("a", 2)
        run.loop.abort("a")
        assert run.mailbox.wait_for_end("a").finish_reason == "abort"
        wait_until(lambda: run.loop.status().load.num_used_blocks == 0)
        assert run.loop.status().load.num_running == 0


def test_a_finished_sample_ends_with_stop() -> None:
    with running(slowly) as run:
        run.loop.submit(request("a", max_tokens=LONG))
        run.mailbox.wait_for_tokens("a", 2)
        run.loop.finish("a", 0, 2)
        assert run.mailbox.wait_for_end("a").finish_reason == "stop"


def test_aborts_and_finishes_of_unknown_and_ended_requests_are_harmless() -> None:
    with running() as run:
        run.loop.submit(request("a", max_tokens=2))
        run.mailbox.wait_for_end("a")
        for request_id in ("a", "unknown"):
            for _ in range(2):
                run.loop.abort(request_id)
                run.loop.finish(request_id, 0, 1)
                run.loop.finish(request_id, 5, 1)
        run.loop.submit(request("next", max_tokens=2))
        assert run.mailbox.wait_for_end("next").finish_reason == "length"
        assert len([e for e in run.mailbox.events("a") if e.finish_reason]) == 1


def test_streams_closed_at_random_moments_leave_a_working_engine_that_holds_nothing() -> None:
    # vllm-project/vllm#6586
    rng = Random(6586)
    with running(lambda number: time.sleep(0.0005)) as run:
        for round_number in range(5):
            names = [f"{round_number}-{number}" for number in range(50)]

            def stream(name: str, num_tokens: int, num_closes: int) -> None:
                run.loop.submit(request(name, num_prompt_tokens=1 + num_tokens, max_tokens=LONG))
                run.mailbox.wait_for_tokens(name, num_tokens)
                for _ in range(num_closes):
                    run.loop.abort(name)

            threads = [
                threading.Thread(target=stream, args=(name, rng.randrange(12), rng.randint(1, 2))) for name in names
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(30.0)
            for name in names:
                run.mailbox.wait_for_end(name)
                tokens = run.mailbox.tokens(name)
                assert tokens == list(range(10, 10 + len(tokens)))
        assert run.deaths == []
        wait_until(lambda: run.loop.status().load.num_used_blocks == 0)
        load = run.loop.status().load
        assert (load.num_waiting, load.num_running, load.num_swapped, load.num_queued_tokens) == (0, 0, 0, 0)
