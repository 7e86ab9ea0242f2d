"""A request goes on elsewhere when its worker is lost: what its caller sees, what is asked, when it is given up."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field, replace

import pytest

from deployments import failover
from deployments.failover import MAX_FRUITLESS_ATTEMPTS, FailoverClient
from deployments.frames import Accepted, Frame, Heartbeat, Tokens
from deployments.worker_client import (
    LostReason,
    RequestRejectedError,
    WorkerFailedError,
    WorkerLostError,
    WorkerOverloadedError,
    WorkerUnavailableError,
)
from tests.fake_worker import LOAD
from worker.types import BeamParams, EngineRequest, SamplingParams, TokenEvent

NUM_TOKENS = 6


@dataclass
class Attempts:
    """Sample i answers with 100·i, 100·i + 1, ...: all samples get a token in each frame, from where the request says
    they are. Attempt k is lost after `cuts[k]` frames with `reasons[k]`, or raises `errors[k]`; one without a cut runs
    to its end."""

    cuts: list[int] = field(default_factory=list)
    reasons: list[LostReason] = field(default_factory=list)
    errors: dict[int, Exception] = field(default_factory=dict)
    before_accepted: Callable[[int], Awaitable[None]] | None = None
    requests: list[EngineRequest] = field(default_factory=list)
    avoided: list[frozenset[str]] = field(default_factory=list)
    finished: list[tuple[str, int, int]] = field(default_factory=list)
    accepted: set[str] = field(default_factory=set)
    num_open: int = 0

    async def generate(
        self, request: EngineRequest, avoid: frozenset[str]
    ) -> AsyncGenerator[list[Frame], None]:
        number = len(self.requests)
        self.requests.append(request)
        self.avoided.append(avoid)
        if number in self.errors:
            raise self.errors[number]
        self.num_open += 1
        try:
            if self.before_accepted is not None:
                await self.before_accepted(number)
            self.accepted.add(request.request_id)
            yield [Accepted(number, f"replica-{number}")]
            yield [Heartbeat(1, 0.0, LOAD)]
            outputs = [list(output) for output in request.output_token_ids] or [[] for _ in range(request.params.n)]
            num_frames = 0
            while open_samples := [
                index for index in request.open_samples if len(outputs[index]) < request.params.max_tokens
            ]:
                if number < len(self.cuts) and num_frames == self.cuts[number]:
                    reason = self.reasons[number] if self.reasons else "died"
                    raise WorkerLostError(f"worker {number} is lost", reason, f"replica-{number}")
                events = [self._event(request, outputs, index) for index in open_samples]
                if num_frames == 0:
                    events[0].num_cached_tokens = 16 * number
                num_frames += 1
                yield [Tokens(events, LOAD)]
        finally:
            self.num_open -= 1

    def _event(self, request: EngineRequest, outputs: list[list[int]], index: int) -> TokenEvent:
        token_id = 100 * index + len(outputs[index])
        outputs[index].append(token_id)
        reason = "length" if len(outputs[index]) == request.params.max_tokens else None
        return TokenEvent(request.request_id, index, [token_id], [(-float(token_id), [])], reason)

    async def finish(self, request_id: str, index: int, num_tokens: int) -> None:
        if request_id in self.accepted:
            self.finished.append((request_id, index, num_tokens))

    async def abort(self, request_id: str) -> None: ...


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failover, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(failover, "_OVERLOAD_PAUSE_S", 0.001)


def ask(n: int = 1) -> EngineRequest:
    return EngineRequest("r", [1, 2, 3], SamplingParams(max_tokens=NUM_TOKENS, n=n, logprobs=0))


def run(attempts: Attempts, asked: EngineRequest) -> tuple[list[Frame], list[str]]:
    reasons: list[str] = []

    async def scenario() -> list[Frame]:
        client = FailoverClient(attempts, 0.5, reasons.append)
        return [frame async for frames in client.generate(asked) for frame in frames]

    frames = asyncio.run(scenario())
    assert attempts.num_open == 0
    return frames, reasons


def events_of(frames: list[Frame]) -> list[TokenEvent]:
    return [event for frame in frames if isinstance(frame, Tokens) for event in frame.events]


def tokens_of(frames: list[Frame], index: int = 0) -> list[int]:
    return [token_id for event in events_of(frames) if event.index == index for token_id in event.token_ids]


def test_an_undisturbed_request_is_one_attempt_under_its_own_id():
    attempts = Attempts()
    frames, reasons = run(attempts, ask())
    assert [request.request_id for request in attempts.requests] == ["r"]
    assert tokens_of(frames) == list(range(NUM_TOKENS))
    assert reasons == []


@pytest.mark.parametrize("cut", range(NUM_TOKENS))
@pytest.mark.parametrize("n", [1, 3])
def test_a_cut_anywhere_leaves_no_trace_in_the_frames(n: int, cut: int):
    whole, _ = run(Attempts(), ask(n))
    attempts = Attempts(cuts=[cut], reasons=["died"])
    frames, reasons = run(attempts, ask(n))
    assert [frame for frame in frames if isinstance(frame, Accepted)] == [Accepted(0, "replica-0")]
    events, expected = events_of(frames), events_of(whole)
    # What the cache gave is told once, by whichever attempt got that far.
    assert [event.num_cached_tokens for event in events] == [0 if cut else 16] + [None] * (n * NUM_TOKENS - 1)
    assert [replace(event, num_cached_tokens=0) for event in events] == [
        replace(event, num_cached_tokens=0) for event in expected
    ]
    assert reasons == ["died"]
    assert len({request.request_id for request in attempts.requests}) == 2
    assert attempts.avoided == [frozenset(), {"replica-0"}]


def test_samples_that_have_ended_are_not_run_again():
    ended_early = Attempts(cuts=[2])

    async def scenario() -> list[Frame]:
        client = FailoverClient(ended_early, 0.5, lambda reason: None)
        frames: list[Frame] = []
        async for batch in client.generate(ask(3)):
            frames += batch
            if len(tokens_of(frames)) == 2 and isinstance(batch[0], Tokens):
                await client.finish("r", 1, 2)  # a stop string, at the caller
        return frames

    frames = asyncio.run(scenario())
    first, second = ended_early.requests
    assert ended_early.finished == [("r", 1, 2)]
    assert second.ended_samples == (1,)
    assert first.ended_samples == ()
    assert second.output_token_ids[0] == [0, 1]
    assert tokens_of(frames, 2) == [200 + position for position in range(NUM_TOKENS)]
    assert tokens_of(frames, 1) == [100, 101]


def test_a_sample_that_ends_at_the_caller_while_the_request_moves_is_told_to_its_new_worker():
    attempts = Attempts(cuts=[2])

    async def scenario() -> list[Frame]:
        client = FailoverClient(attempts, 0.5, lambda reason: None)

        async def finish_on_the_way(number: int) -> None:
            if number == 1:
                await client.finish("r", 1, 1)

        attempts.before_accepted = finish_on_the_way
        return [frame async for frames in client.generate(ask(2)) for frame in frames]

    frames = asyncio.run(scenario())
    assert attempts.requests[1].ended_samples == ()
    assert attempts.finished == [("r~1", 1, 1)]
    assert tokens_of(frames) == list(range(NUM_TOKENS))


def test_nothing_is_asked_again_when_every_sample_had_ended():
    attempts = Attempts(cuts=[2])

    async def scenario() -> None:
        client = FailoverClient(attempts, 0.5, lambda reason: None)
        seen: list[Frame] = []
        async for batch in client.generate(ask()):
            seen += batch
            if len(tokens_of(seen)) == 2:
                await client.finish("r", 0, 2)

    asyncio.run(scenario())
    assert len(attempts.requests) == 1


def test_a_beam_search_starts_from_its_prompt():
    attempts = Attempts(cuts=[0, 0], reasons=["died", "drained"])
    params = SamplingParams(max_tokens=NUM_TOKENS, n=2, beam=BeamParams(4))
    run(attempts, EngineRequest("r", [1], params))
    assert [request.output_token_ids for request in attempts.requests] == [[], [], []]
    assert [request.ended_samples for request in attempts.requests] == [(), (), ()]


def test_many_losses_with_a_token_in_between_end_well():
    frames, reasons = run(Attempts(cuts=[1] * (NUM_TOKENS - 1)), ask())
    assert tokens_of(frames) == list(range(NUM_TOKENS))
    assert reasons == ["died"] * (NUM_TOKENS - 1)


def test_a_request_on_which_two_workers_died_is_given_up():
    attempts = Attempts(cuts=[2, 0, 0])
    with pytest.raises(WorkerFailedError, match="2 workers died one after the other"):
        run(attempts, ask())
    assert len(attempts.requests) == 2


def test_workers_that_stall_one_after_the_other_are_tried_a_few_times():
    attempts = Attempts(cuts=[0] * 9, reasons=["stalled"] * 9)
    with pytest.raises(WorkerFailedError, match="one after the other"):
        run(attempts, ask())
    assert len(attempts.requests) == 1 + MAX_FRUITLESS_ATTEMPTS


def test_drains_are_nobodys_fault():
    frames, reasons = run(Attempts(cuts=[0] * 9, reasons=["drained"] * 9), ask())
    assert tokens_of(frames) == list(range(NUM_TOKENS))
    assert reasons == ["drained"] * 9


@pytest.mark.parametrize(
    "error",
    [
        RequestRejectedError("too long"),
        WorkerFailedError("NaN"),
        WorkerUnavailableError("none"),
        WorkerOverloadedError(3),
    ],
)
def test_what_is_not_the_loss_of_a_worker_is_handed_on(error: Exception):
    attempts = Attempts(errors={0: error})
    with pytest.raises(type(error)):
        run(attempts, ask())
    assert len(attempts.requests) == 1


def test_a_running_request_that_nobody_takes_fails_as_a_failure_of_its_worker():
    attempts = Attempts(cuts=[2], errors={1: WorkerUnavailableError("none within 30 s")})
    with pytest.raises(WorkerFailedError, match="no other one took the request: none within 30 s"):
        run(attempts, ask())


def test_a_running_request_waits_for_room_where_all_queues_are_full():
    attempts = Attempts(cuts=[2], errors={number: WorkerOverloadedError(9.0) for number in range(1, 6)})
    frames, _ = run(attempts, ask())
    assert tokens_of(frames) == list(range(NUM_TOKENS))
    assert len({request.request_id for request in attempts.requests}) == 2


def test_a_running_request_waits_for_room_only_so_long():
    attempts = Attempts(cuts=[2], errors={number: WorkerOverloadedError(9.0) for number in range(1, 100_000)})
    with pytest.raises(WorkerFailedError, match="full"):
        run(attempts, ask())


def test_a_stream_that_ends_too_early_is_a_lost_worker():
    class Short(Attempts):
        async def generate(
            self, request: EngineRequest, avoid: frozenset[str]
        ) -> AsyncGenerator[list[Frame], None]:
            async for frames in super().generate(request, avoid):
                yield frames
                if len(self.requests) == 1 and isinstance(frames[0], Tokens):
                    return

    frames, reasons = run(Short(), ask())
    assert tokens_of(frames) == list(range(NUM_TOKENS))
    assert reasons == ["died"]


def test_a_caller_that_leaves_leaves_nothing_behind():
    attempts = Attempts(cuts=[1])

    async def scenario() -> None:
        client = FailoverClient(attempts, 0.5, lambda reason: None)
        stream = client.generate(ask())
        seen: list[Frame] = []
        async for batch in stream:
            seen += batch
            if len(tokens_of(seen)) == 3:
                break
        await client.abort("r")
        await stream.aclose()
        assert attempts.num_open == 0
        await client.finish("r", 0, 1)
        await client.abort("r")

    asyncio.run(scenario())
    assert attempts.finished == []
