"""`WorkerStreams`: the open output streams of one worker, by request id.

Owns a queue of frames for each open request, heartbeats, and how streams end when the engine dies. All of it runs
on the event loop; it knows neither the engine nor Serve.
"""

import asyncio
from collections.abc import AsyncIterator

from deployments.frames import HEARTBEAT_S, Frame, Heartbeat, Tokens
from worker.types import EngineLoad, EngineRequest, TokenEvent

#: streams are looked at twice per heartbeat, so that none is silent for longer than one
HEARTBEAT_CHECK_S = HEARTBEAT_S / 2


class _Stream:
    """Frames on their way out. What a stream can hold is bounded by its request's `max_tokens`."""

    __slots__ = ("frames", "is_quiet", "open_indices")

    def __init__(self, open_samples: list[int]) -> None:
        self.frames: asyncio.Queue[Frame] = asyncio.Queue()
        self.open_indices = set(open_samples)
        self.is_quiet = False


class WorkerStreams:
    """Each open request has one stream; a stream ends after the finish event of its last sample."""

    def __init__(self) -> None:
        self._streams: dict[str, _Stream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def num_open_samples(self) -> int:
        """Sequences that go on or are yet to begin."""
        return sum(len(stream.open_indices) for stream in self._streams.values())

    def open(self, request: EngineRequest) -> None:
        """Raises ValueError where the id is already open."""
        if request.request_id in self._streams:
            raise ValueError(f"request {request.request_id} is already open on this worker")
        self._streams[request.request_id] = _Stream(request.open_samples)

    def close(self, request_id: str) -> bool:
        """Whether the engine had not ended the request, so that it must be told."""
        return len(self._streams.pop(request_id).open_indices) > 0

    async def frames(self, request_id: str) -> AsyncIterator[list[Frame]]:
        """Everything that is there, as soon as anything is, until the last sample has ended."""
        stream = self._streams[request_id]
        while stream.open_indices or not stream.frames.empty():
            frames = [await stream.frames.get()]
            while not stream.frames.empty():
                frames.append(stream.frames.get_nowait())
            yield frames

    def deliver(self, events: list[TokenEvent], load: EngineLoad) -> None:
        """All events of one step. Those of streams that are gone are dropped: their abort is on its way."""
        by_request: dict[str, list[TokenEvent]] = {}
        for event in events:
            by_request.setdefault(event.request_id, []).append(event)
        for request_id, own_events in by_request.items():
            stream = self._streams.get(request_id)
            if stream is not None:
                stream.is_quiet = False
                stream.open_indices -= {event.index for event in own_events if event.finish_reason is not None}
                stream.frames.put_nowait(Tokens(own_events, load))

    def beat(self, heartbeat: Heartbeat) -> None:
        """A heartbeat for each stream that has had nothing since the last call."""
        for stream in self._streams.values():
            if stream.is_quiet:
                stream.frames.put_nowait(heartbeat)
            stream.is_quiet = True

    def fail_all(self, error: str, load: EngineLoad) -> None:
        """Ends every open sample with an error event that lets another worker go on."""
        events = [
            TokenEvent(request_id, index, [], finish_reason="error", error=error, is_worker_lost=True)
            for request_id, stream in self._streams.items()
            for index in sorted(stream.open_indices)
        ]
        self.deliver(events, load)
