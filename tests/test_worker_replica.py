"""A worker's streams over a small engine, without Ray: frames, heartbeats, aborts, death."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator

import pytest

from deployments.engine_seam import build_engine, import_builder
from deployments.frames import HEARTBEAT_S, Accepted, Frame, Heartbeat, Overloaded, Tokens
from deployments.live_options import LiveOptions
from deployments.worker_queue import QueueLimits
from deployments.worker_service import EXIT_DELAY_S, WorkerDeadError, WorkerService
from deployments.worker_streams import WorkerStreams
from tests.fake_engine import BLOCK_SIZE, DIE, HANG, HANG_S, NEVER_FITS, FakeLoop, expected_tokens
from tests.steppable_engine import SteppableEngine
from tests.steppable_engine import request as steppable_request
from worker.engine_loop import EngineLoop
from worker.types import EngineLoad, EngineRequest, SamplingParams, TokenEvent

STEP_TIMEOUT_S = 60.0
LOAD = EngineLoad(0, 1, 0, 0, 10, 1)


class Exits:
    """Stands for the end of the process."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


@contextlib.asynccontextmanager
async def running_service(
    *, step_s: float = 0.001, step_timeout_s: float = STEP_TIMEOUT_S
) -> AsyncIterator[tuple[WorkerService, FakeLoop, Exits]]:
    exits = Exits()
    service = WorkerService(3, "replica-3", step_timeout_s, exits)
    loop = FakeLoop(service.deliver, service.on_death, step_s)
    service.start(loop, BLOCK_SIZE)
    try:
        yield service, loop, exits
    finally:
        await service.stop(5.0)


def request(request_id: str, prompt: list[int], max_tokens: int) -> EngineRequest:
    return EngineRequest(request_id, prompt, SamplingParams(max_tokens=max_tokens))


async def frames_of(service: WorkerService, asked: EngineRequest) -> list[Frame]:
    return [frame async for frames in service.generate(asked) for frame in frames]


def tokens_of(frames: list[Frame]) -> list[int]:
    events = [event for frame in frames if isinstance(frame, Tokens) for event in frame.events]
    return [token_id for event in events for token_id in event.token_ids]


def last_event_of(frames: list[Frame]) -> TokenEvent:
    last = frames[-1]
    assert isinstance(last, Tokens)
    return last.events[-1]


async def eventually(condition, timeout_s: float = 2.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def test_a_stream_starts_with_accepted_and_ends_after_its_last_token():
    async def scenario() -> list[Frame]:
        async with running_service() as (service, _, _):
            return await frames_of(service, request("a", [5, 6], 20))

    frames = asyncio.run(scenario())
    assert frames[0] == Accepted(3, "replica-3")
    assert tokens_of(frames) == expected_tokens([5, 6], 20)
    assert last_event_of(frames).finish_reason == "length"


def test_sixty_four_streams_at_once_each_get_their_own_tokens():
    async def scenario() -> list[list[Frame]]:
        async with running_service() as (service, _, _):
            asked = [request(f"r{i}", [i + 1, 7], 15) for i in range(64)]
            return await asyncio.gather(*(frames_of(service, one) for one in asked))

    for i, frames in enumerate(asyncio.run(scenario())):
        assert tokens_of(frames) == expected_tokens([i + 1, 7], 15)


def test_what_waits_is_sent_in_one_list():
    async def scenario() -> int:
        streams = WorkerStreams()
        streams.open(request("a", [1], 3))
        for token_id in range(2):
            streams.deliver([TokenEvent("a", 0, [token_id])], LOAD)
        streams.deliver([TokenEvent("a", 0, [2], finish_reason="length")], LOAD)
        return [len(frames) async for frames in streams.frames("a")]

    assert asyncio.run(scenario()) == [3]


def test_a_stream_of_two_samples_ends_with_the_second_one():
    async def scenario() -> list[int]:
        streams = WorkerStreams()
        streams.open(EngineRequest("a", [1], SamplingParams(max_tokens=2, n=2)))
        seen = []
        streams.deliver([TokenEvent("a", 1, [7], finish_reason="stop")], LOAD)
        async for frames in streams.frames("a"):
            seen += tokens_of(frames)
            if seen == [7]:
                streams.deliver([TokenEvent("a", 0, [8], finish_reason="length")], LOAD)
        return seen

    assert asyncio.run(scenario()) == [7, 8]


def test_closing_the_stream_aborts_the_request_in_the_engine():
    async def scenario() -> list[str]:
        async with running_service() as (service, loop, _):
            stream = service.generate(request("gone", [1], 100_000))
            async for frames in stream:
                if tokens_of(frames):
                    break
            await stream.aclose()
            await eventually(service.is_idle)
            return loop.aborted

    assert asyncio.run(scenario()) == ["gone"]


def test_cancelling_fifty_streams_at_random_moments_leaves_the_engine_idle_and_alive():
    async def scenario() -> list[Frame]:
        async with running_service() as (service, _, _):
            for round_ in range(5):
                tasks = [
                    asyncio.create_task(frames_of(service, request(f"{round_}-{i}", [i + 1], 100_000)))
                    for i in range(50)
                ]
                for i, task in enumerate(tasks):
                    await asyncio.sleep(0.0003 * (i % 7))
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            await eventually(service.is_idle)
            return await frames_of(service, request("after", [2], 4))

    assert tokens_of(asyncio.run(scenario())) == expected_tokens([2], 4)


def test_a_stream_that_ended_by_itself_is_not_aborted():
    async def scenario() -> list[str]:
        async with running_service() as (service, loop, _):
            await frames_of(service, request("a", [1], 3))
            return loop.aborted

    assert asyncio.run(scenario()) == []


def test_finish_and_abort_of_unknown_requests_are_no_error():
    async def scenario() -> None:
        async with running_service() as (service, _, _):
            for _ in range(2):
                service.finish("nobody", 0, 3)
                service.abort("nobody")
            service.check_health()

    asyncio.run(scenario())


def test_a_choice_finished_by_the_ingress_ends_its_stream():
    async def scenario() -> list[Frame]:
        async with running_service() as (service, _, _):
            seen: list[Frame] = []
            async for frames in service.generate(request("a", [1], 100_000)):
                if tokens_of(frames) and not tokens_of(seen):
                    service.finish("a", 0, 1)
                seen += frames
            return seen

    assert last_event_of(asyncio.run(scenario())).finish_reason == "stop"


def test_a_request_that_can_never_fit_gets_an_error_event_and_the_next_one_is_served():
    async def scenario() -> tuple[list[Frame], list[Frame]]:
        async with running_service() as (service, _, _):
            refused = await frames_of(service, request("big", [NEVER_FITS], 3))
            return refused, await frames_of(service, request("small", [1], 3))

    refused, served = asyncio.run(scenario())
    assert last_event_of(refused).finish_reason == "error"
    assert last_event_of(refused).error == "the prompt can never fit"
    assert tokens_of(served) == expected_tokens([1], 3)


def test_the_same_id_twice_at_once_is_refused_and_the_first_goes_on():
    async def scenario() -> list[Frame]:
        async with running_service() as (service, _, _):
            first = asyncio.create_task(frames_of(service, request("a", [1], 50)))
            await asyncio.sleep(0.005)
            with pytest.raises(ValueError, match="already open"):
                await frames_of(service, request("a", [2], 3))
            return await first

    assert tokens_of(asyncio.run(scenario())) == expected_tokens([1], 50)


def test_a_long_step_sends_heartbeats_with_its_age_and_is_healthy():
    async def scenario() -> list[Frame]:
        async with running_service() as (service, _, _):
            stream = asyncio.create_task(frames_of(service, request("slow", [HANG], 1)))
            await asyncio.sleep(HANG_S / 2)
            service.check_health()
            return await stream

    beats = [frame for frame in asyncio.run(scenario()) if isinstance(frame, Heartbeat)]
    assert len(beats) >= int(HANG_S / HEARTBEAT_S)
    assert max(beat.step_age_s for beat in beats) > HANG_S / 2
    assert all(beat.load.num_running == 1 for beat in beats)


def test_a_step_over_the_limit_is_unhealthy():
    async def scenario() -> None:
        async with running_service(step_timeout_s=0.2) as (service, _, _):
            stream = asyncio.create_task(frames_of(service, request("slow", [HANG], 1)))
            await asyncio.sleep(0.6)
            with pytest.raises(WorkerDeadError, match="stuck"):
                service.check_health()
            await stream

    asyncio.run(scenario())


def test_a_dead_engine_fails_every_stream_then_health_then_the_process():
    async def scenario() -> tuple[list[list[Frame]], Exits]:
        async with running_service() as (service, _, exits):
            streams = [
                asyncio.create_task(frames_of(service, request(f"r{i}", [i + 1], 100_000))) for i in range(5)
            ]
            await asyncio.sleep(0.02)
            streams.append(asyncio.create_task(frames_of(service, request("fatal", [DIE], 5))))
            ended = await asyncio.gather(*streams)
            assert exits.count == 0
            with pytest.raises(WorkerDeadError, match="told to die"):
                service.check_health()
            with pytest.raises(WorkerDeadError):
                await frames_of(service, request("late", [1], 3))
            await asyncio.sleep(EXIT_DELAY_S + 0.2)
            return ended, exits

    ended, exits = asyncio.run(scenario())
    for frames in ended:
        assert last_event_of(frames).finish_reason == "error"
        assert "told to die" in str(last_event_of(frames).error)
    assert exits.count == 1


def test_a_full_queue_answers_overloaded_and_nothing_else_and_the_next_one_is_served_when_there_is_room():
    async def scenario() -> list[list[Frame]]:
        async with running_service(step_s=0.05) as (service, loop, _):
            service.apply(LiveOptions(loop.limits, QueueLimits(5, 0)))
            # The first prompt waits for its step; the queue that it finds is empty.
            first = asyncio.create_task(frames_of(service, request("first", [1] * 9, 2)))
            await asyncio.sleep(0.001)
            second = await frames_of(service, request("second", [2], 2))
            await first
            return [first.result(), second, await frames_of(service, request("third", [3] * 9, 2))]

    first, second, third = asyncio.run(scenario())
    assert tokens_of(first) == expected_tokens([1] * 9, 2)
    assert [type(frame) for frame in second] == [Overloaded]
    assert isinstance(second[0], Overloaded)
    assert second[0].retry_after_s >= 1.0
    assert second[0].load.num_queued_tokens == 9
    assert tokens_of(third) == expected_tokens([3] * 9, 2)


def test_an_answer_that_was_begun_elsewhere_is_never_turned_away():
    async def scenario() -> list[Frame]:
        async with running_service(step_s=0.05) as (service, loop, _):
            service.apply(LiveOptions(loop.limits, QueueLimits(1, 1)))
            first = asyncio.create_task(frames_of(service, request("first", [1] * 9, 2)))
            await asyncio.sleep(0.001)
            resumed = EngineRequest("resumed", [2], SamplingParams(max_tokens=3), output_token_ids=[[7]])
            frames = await frames_of(service, resumed)
            await first
            return frames

    assert isinstance(asyncio.run(scenario())[0], Accepted)


def test_a_request_that_was_turned_away_left_nothing_open():
    async def scenario() -> None:
        async with running_service(step_s=0.05) as (service, loop, _):
            service.apply(LiveOptions(loop.limits, QueueLimits(1, 0)))
            first = asyncio.create_task(frames_of(service, request("first", [1] * 9, 2)))
            await asyncio.sleep(0.001)
            for _ in range(20):
                assert isinstance((await frames_of(service, request("again", [2], 2)))[0], Overloaded)
            await first
            assert isinstance((await frames_of(service, request("again", [2], 2)))[0], Accepted)

    asyncio.run(scenario())


async def answers_to_a_burst(asked: list[EngineRequest], max_queued_requests: int) -> list[Frame]:
    """The first frame that each gets while the engine is about to take its first step."""
    may_step = threading.Event()
    engine = SteppableEngine(lambda number: None if may_step.wait(10.0) else pytest.fail("nobody let it step"))
    service = WorkerService(0, "replica", STEP_TIMEOUT_S, Exits())
    loop = EngineLoop(engine, service.deliver, service.on_death)  # type: ignore[arg-type]
    service.start(loop, engine.stepper.blocks.block_size)
    service.apply(LiveOptions(loop.limits, QueueLimits(0, max_queued_requests)))
    streams = [service.generate(one) for one in asked]
    first = [(await anext(stream))[0] for stream in streams]
    may_step.set()
    for stream in streams:
        async for _ in stream:
            pass
    await service.stop(5.0)
    return first


def num_accepted(frames: list[Frame]) -> int:
    return sum(isinstance(frame, Accepted) for frame in frames)


def test_an_idle_worker_takes_a_burst_that_its_free_slots_hold_beside_what_may_wait():
    asked = [steppable_request(f"r{number}") for number in range(30)]
    accepted = asyncio.run(answers_to_a_burst(asked, max_queued_requests=2))
    assert num_accepted(accepted) == 16 + 2
    # In order: nobody is passed over for a later one.
    assert all(isinstance(frame, Accepted) for frame in accepted[:18])


def test_free_slots_are_no_room_for_prompts_that_find_no_blocks():
    num_tokens = 40 * 4 // 3 - 1
    asked = [steppable_request(f"r{number}", num_prompt_tokens=num_tokens) for number in range(10)]
    assert num_accepted(asyncio.run(answers_to_a_burst(asked, max_queued_requests=2))) == 3


def test_builders_are_named_by_import_path():
    assert import_builder("deployments.engine_seam:build_engine") is build_engine
