"""Token events to text: `Answer` keeps what the client has been given of a choice, `follow` drives the choices of one
request from its frames.

Owns text, stop strings, token counts and finish reasons of a choice. Knows neither HTTP nor JSON.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from deployments.frames import Accepted, Frame, Tokens
from deployments.prompt_entries import PromptEntry, prompt_entries
from deployments.protocol.responses import TokenLogprob
from deployments.worker_client import WorkerClient, WorkerFailedError
from worker.text import Detokenizer, StopStrings, Tokenizer
from worker.types import EngineRequest, PromptTokenLogprobs, TokenEvent

logger = logging.getLogger(__name__)

#: telling a worker that an answer ended must not hold up the answer: one that hangs drops it when its stream is closed
_TELL_WORKER_TIMEOUT_S = 1.0


@dataclass(slots=True)
class Delta:
    """What is new of a choice. `num_tokens` are the tokens that this text, or its end, stands for;
    `num_cached_tokens` those of the prompt that came from the prefix cache, told once for all choices of a prompt;
    `prompt` its tokens with their log-probabilities, where they are wanted, in the first delta of each choice.
    `stop_string` is the one that ended the choice, if any."""

    index: int
    text: str
    num_tokens: int
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    num_cached_tokens: int = 0
    prompt: list[PromptEntry] | None = None
    stop_string: str | None = None


@dataclass(frozen=True, slots=True)
class AnswerAccepted:
    """A worker holds the request."""

    request_id: str


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How tokens become the client's text. Stop strings are not looked for in fewer than `min_tokens` tokens."""

    stop: tuple[str, ...] = ()
    include_stop_str: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    #: made for each answer; told of all its text, it says when the answer is over, as a stop string does
    until: Callable[[], Callable[[str], bool]] | None = None


class Answer:
    """One choice. Invariant: `num_tokens` counts the tokens up to the one that ended the answer, no overrun.

    A stop token that ended the answer counts, and has its log-probability, but is no part of the text (unless
    stop strings are included). `echoed` is the text of the prompt where it comes before the answer, else "".
    """

    def __init__(self, index: int, tokenizer: Tokenizer, options: TextOptions, echoed: str = "") -> None:
        self.index = index
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.is_stopped_here = False
        self._options = options
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, options.skip_special_tokens)
        self._stop_strings = StopStrings(list(options.stop), options.include_stop_str)
        self._is_over_after = None if options.until is None else options.until()
        self._prompt_text = echoed
        self._text = echoed
        self._num_chars = len(echoed)
        self._num_unsent_tokens = 0
        self._unsent_logprobs: list[TokenLogprob] = []
        self._unsent_prompt: list[PromptEntry] | None = None

    def prompt_entries(self, token_ids: list[int], logprobs: list[PromptTokenLogprobs]) -> list[PromptEntry]:
        return prompt_entries(self._tokenizer, token_ids, logprobs, self._prompt_text)

    def tell_prompt(self, entries: list[PromptEntry]) -> None:
        """The prompt's log-probabilities go with the first delta. A worker that took the answer over tells none."""
        self._unsent_prompt = entries

    def push(self, event: TokenEvent) -> Delta | None:
        """What the client can be given now; None while that is nothing. Raises WorkerFailedError where the engine
        ended the answer for a fault."""
        if event.finish_reason in ("error", "abort"):
            raise WorkerFailedError(event.error or f"the engine ended the request ({event.finish_reason})")
        num_text_tokens = len(event.token_ids)
        if event.finish_reason == "stop" and not self._options.include_stop_str:
            num_text_tokens -= 1
        for position, token_id in enumerate(event.token_ids):
            self._count(token_id, event, position)
            if position < num_text_tokens and self._add_text(self._detokenizer.push([token_id])):
                break
        if event.finish_reason is not None and self.finish_reason is None:
            self._end(event.finish_reason)
        return self._take_delta()

    def _count(self, token_id: int, event: TokenEvent, position: int) -> None:
        self.num_tokens += 1
        self._num_unsent_tokens += 1
        if event.logprobs is not None:
            self._unsent_logprobs.append(TokenLogprob(token_id, event.logprobs[position], self._num_chars))

    def _add_text(self, text: str) -> bool:
        """Whether it ends the answer: a stop string completed, or nothing more is wanted."""
        self._num_chars += len(text)
        if self.num_tokens < self._options.min_tokens:
            self._text += text
            return False
        safe, is_stopped = self._stop_strings.push(text)
        self._text += safe
        if not is_stopped and safe and self._is_over_after is not None:
            is_stopped = self._is_over_after(safe)
        if is_stopped:
            self.finish_reason = "stop"
            self.is_stopped_here = True
        return is_stopped

    def _end(self, finish_reason: str) -> None:
        if self._add_text(self._detokenizer.flush()):
            return
        self._text += self._stop_strings.flush()
        self.finish_reason = finish_reason

    def _take_delta(self) -> Delta | None:
        if not self._text and self.finish_reason is None:
            return None
        delta = Delta(self.index, self._text, self._num_unsent_tokens, self._unsent_logprobs, self.finish_reason)
        delta.prompt, self._unsent_prompt = self._unsent_prompt, None
        delta.stop_string = self._stop_strings.matched
        self._text, self._num_unsent_tokens, self._unsent_logprobs = "", 0, []
        return delta


async def follow(
    client: WorkerClient, request: EngineRequest, answers: list[Answer]
) -> AsyncGenerator[AnswerAccepted | Delta, None]:
    """Runs a request to the end of its answers, one a sample. However it ends, the worker's work ends with it."""
    frames = client.generate(request)
    told: list[asyncio.Task[None]] = []
    num_open = len(answers)
    num_cached_tokens = 0
    try:
        async for batch in frames:
            for frame in batch:
                if isinstance(frame, Accepted):
                    yield AnswerAccepted(request.request_id)
                elif isinstance(frame, Tokens):
                    for event in frame.events:
                        num_cached_tokens += event.num_cached_tokens or 0
                        if event.prompt_logprobs is not None:
                            await _tell_prompt(request, answers, event.prompt_logprobs)
                        answer = answers[event.index]
                        if answer.finish_reason is not None:
                            continue  # overrun, or the worker's word that it has ended
                        delta = answer.push(event)
                        if delta is not None:
                            delta.num_cached_tokens, num_cached_tokens = num_cached_tokens, 0
                            yield delta
                        if answer.finish_reason is not None:
                            num_open -= 1
                            if answer.is_stopped_here:
                                # Beside the stream: the other answers go on meanwhile.
                                told.append(asyncio.create_task(_finish(client, request, event.index, answer)))
                            if num_open == 0:
                                return
        raise WorkerFailedError("the worker's stream ended before the answer did")
    finally:
        await _release(client, request, answers, told, frames)


async def _tell_prompt(
    request: EngineRequest, answers: list[Answer], logprobs: list[PromptTokenLogprobs]
) -> None:
    # A long prompt takes longer than other requests should wait.
    entries = await asyncio.to_thread(answers[0].prompt_entries, request.prompt_token_ids, logprobs)
    for answer in answers:
        answer.tell_prompt(entries)


async def _finish(client: WorkerClient, request: EngineRequest, sample_index: int, answer: Answer) -> None:
    with _tells_worker(request):
        async with asyncio.timeout(_TELL_WORKER_TIMEOUT_S):
            await client.finish(request.request_id, sample_index, answer.num_tokens)


async def _release(
    client: WorkerClient,
    request: EngineRequest,
    answers: list[Answer],
    told: list[asyncio.Task[None]],
    frames: AsyncIterator[list[Frame]],
) -> None:
    try:
        if any(answer.finish_reason is None for answer in answers):
            with _tells_worker(request):
                async with asyncio.timeout(_TELL_WORKER_TIMEOUT_S):
                    await client.abort(request.request_id)
        await asyncio.gather(*told)
    finally:
        close = getattr(frames, "aclose", None)
        if close is not None:
            await close()


@contextmanager
def _tells_worker(request: EngineRequest) -> Iterator[None]:
    """A worker that cannot be told does no harm: the answer is over for the client, and its stream ends with it."""
    try:
        yield
    except Exception:
        logger.exception("could not tell the worker that request %s ended", request.request_id)
