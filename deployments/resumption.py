"""`Resumption`: what has reached the caller of one request, and the request that goes on from there.

Owns the output of each sample as it was delivered, and the ids of attempts. Knows neither workers nor why one is lost.
"""

from dataclasses import replace

from deployments.frames import Accepted, Frame, Tokens
from worker.types import EngineRequest, TokenEvent


class Resumption:
    """One request over all its attempts. Invariant: `outputs` are the tokens that the caller has, no more, no fewer.

    A beam search shows nothing before its end, so that it starts from the prompt each time.
    """

    def __init__(self, request: EngineRequest) -> None:
        self._request = request
        self._outputs = [list(output) for output in request.output_token_ids] or [[] for _ in range(request.params.n)]
        self._ended = set(request.ended_samples)
        #: samples that ended at the caller (a stop string), and after how many tokens
        self._finished: dict[int, int] = {}
        self._is_accepted = False
        self._has_told_cached = False
        self._num_attempts = 0
        self._num_tokens_before = 0
        self.num_tokens = 0
        self.attempt = request
        #: the replica that holds the present attempt; "" until one does
        self.replica_id = ""

    def next_attempt(self) -> EngineRequest:
        """The request from here on. Its id is new: the worker of an earlier attempt may live and still hold that."""
        request = self._request
        self.replica_id = ""
        self._num_tokens_before = self.num_tokens
        if self._num_attempts > 0:
            self.attempt = replace(request, request_id=f"{request.request_id}~{self._num_attempts}")
            if request.params.beam is None:
                ended = tuple(sorted(self._ended | self._finished.keys()))
                outputs = [list(output) for output in self._outputs]
                self.attempt = replace(self.attempt, output_token_ids=outputs, ended_samples=ended)
        self._num_attempts += 1
        return self.attempt

    @property
    def is_accepted(self) -> bool:
        """Whether the caller has been told that a worker holds the request."""
        return self._is_accepted

    @property
    def has_progress(self) -> bool:
        """Whether the present attempt has delivered a token."""
        return self.num_tokens > self._num_tokens_before

    @property
    def is_ended(self) -> bool:
        return len(self._ended | self._finished.keys()) == self._request.params.n

    def take(self, frames: list[Frame]) -> list[Frame]:
        """What the caller gets of the present attempt's frames, as if there had been no other."""
        is_resumed = self._num_attempts > 1
        fresh: list[Frame] = []
        for frame in frames:
            if isinstance(frame, Accepted):
                self.replica_id = frame.replica_id
                if self._is_accepted:
                    continue
                self._is_accepted = True
            elif isinstance(frame, Tokens):
                for event in frame.events:
                    self._take_event(event, is_resumed=is_resumed)
            fresh.append(frame)
        return fresh

    def finish(self, index: int, num_tokens: int) -> None:
        """The sample ended at the caller; no later attempt runs it."""
        self._finished.setdefault(index, num_tokens)

    def finished_meanwhile(self) -> dict[int, int]:
        """Samples that ended at the caller after the present attempt was sent, and the numbers of their tokens."""
        if self._request.params.beam is not None:
            return {}
        known = self._ended | set(self.attempt.ended_samples)
        return {index: count for index, count in self._finished.items() if index not in known}

    def _take_event(self, event: TokenEvent, *, is_resumed: bool) -> None:
        self._outputs[event.index] += event.token_ids
        self.num_tokens += len(event.token_ids)
        if event.finish_reason is not None:
            self._ended.add(event.index)
        if is_resumed:
            event.request_id = self._request.request_id
            if self._has_told_cached:
                event.num_cached_tokens = None
        if event.num_cached_tokens is not None:
            self._has_told_cached = True
