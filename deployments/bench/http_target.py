"""An OpenAI-compatible server as a target: streamed completions over HTTP.

Owns the dialect: what this server takes (token ids or text, `ignore_eos`, usage) and how it ends a stream is found
out before the run.
"""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from deployments.bench.prompts import PromptMaker
from deployments.bench.requests import Answer, PlannedRequest
from deployments.bench.target import TargetError
from deployments.bench.usage import read_usage

_PROBE_TOKENS = 8
_CONNECT_TIMEOUT_S = 10.0
#: of what is asked before the run, however long the requests of a run may take
_PROBE_TIMEOUT_S = 120.0
_SHOWN_ERROR_CHARS = 160
#: statuses by which servers refuse a field or the form of a prompt, one of them with 500
_REFUSALS = (400, 404, 422, 500)
_MAX_LINE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Dialect:
    """What the server takes. Without `ignore_eos` answers may end early; without usage deliveries are counted. `done`:
    its streams end with `[DONE]`; others end with their finish reason."""

    token_ids: bool = True
    ignore_eos: bool = True
    usage: bool = True
    done: bool = True


class _RefusedError(TargetError):
    """The server answered with a status that refuses the request."""


class HttpTarget:
    """Opens as many connections as there are requests open: waiting for one would hide the server's queue."""

    def __init__(
        self,
        url: str,
        prompts: PromptMaker,
        *,
        model: str | None,
        text: bool,
        api_key: str | None,
        name: str | None = None,
        more_fields: Mapping[str, Any] | None = None,
        timeout_s: float = math.inf,
    ) -> None:
        """`more_fields` go into every request, for what only this server has. `name`: its URL, unless given.
        `timeout_s`: of the list of models and of each probe, at most two minutes."""
        base = url.rstrip("/")
        self.name = base if name is None else name
        self.url = base if base.endswith("/v1") else f"{base}/v1"
        self._prompts = prompts
        self._model = model
        self.dialect = Dialect(token_ids=not text)
        self._more_fields = dict(more_fields or {})
        self._probe_timeout_s = min(timeout_s, _PROBE_TIMEOUT_S)
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
            headers=self._headers,
            read_bufsize=_MAX_LINE_BYTES,
        )
        if self._model is None:
            self._model = await self._first_model()
        await self._find_dialect()

    def use_text(self) -> None:
        """Words from now on, not token ids."""
        self.dialect = replace(self.dialect, token_ids=False)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def ask(self, answer: Answer, run: int) -> None:
        request = answer.request
        loop = asyncio.get_running_loop()
        usage: Any = None
        num_characters = 0
        end = _End()
        async for chunk in self._chunks(self._body(request, run, self.dialect), end):
            now = loop.time()
            size = sum(_size(choice) for choice in chunk.get("choices") or ())
            if size:
                answer.delivery_times_s.append(now)
                num_characters += size
            usage = chunk.get("usage") or usage
        end.check(self.dialect)
        if usage is None:
            answer.num_input_tokens = request.num_input_tokens
            # A token that only begins a character comes with the next one: fewer deliveries than tokens.
            answer.num_output_tokens = (
                request.num_output_tokens if end.finish_reason == "length" else len(answer.delivery_times_s)
            )
        else:
            counted = read_usage(
                usage,
                num_input_asked=request.num_input_tokens,
                num_output_asked=request.num_output_tokens,
                num_characters=num_characters,
                num_deliveries=len(answer.delivery_times_s),
            )
            answer.num_input_tokens = counted.num_input_tokens
            answer.num_output_tokens = counted.num_output_tokens

    def _body(self, request: PlannedRequest, run: int, dialect: Dialect) -> dict[str, Any]:
        prompt = self._prompts.token_ids(request, run) if dialect.token_ids else self._prompts.text(request, run)
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": request.num_output_tokens,
            "temperature": 0.0,
            "stream": True,
        }
        if dialect.ignore_eos:
            body["ignore_eos"] = True
        if dialect.usage:
            body["stream_options"] = {"include_usage": True}
        return body | self._more_fields

    async def _find_dialect(self) -> None:
        """Leaves out, one more with each refusal, what a strict server may not know. Raises the last refusal."""
        full = self.dialect
        without_usage = replace(full, usage=False)
        plain = Dialect(token_ids=full.token_ids, ignore_eos=False, usage=False)
        candidates = [full, replace(full, ignore_eos=False), without_usage, plain]
        candidates += [replace(dialect, token_ids=False) for dialect in candidates if full.token_ids]
        probe = PlannedRequest(0, 0.0, _PROBE_TOKENS, 2)
        for place, dialect in enumerate(candidates):
            end = _End()
            try:
                async with asyncio.timeout(self._probe_timeout_s):
                    async for _ in self._chunks(self._body(probe, -1, dialect), end):
                        pass
            except TimeoutError as error:
                raise TargetError(f"no answer to a small request within {self._probe_timeout_s:g} s") from error
            except _RefusedError:
                if place == len(candidates) - 1:
                    raise
                continue
            self.dialect = replace(dialect, done=end.said_done)
            end.check(self.dialect)
            return

    async def _first_model(self) -> str:
        assert self._session is not None
        try:
            async with (
                asyncio.timeout(self._probe_timeout_s) as limit,
                self._session.get(f"{self.url}/models") as response,
            ):
                if response.status != 200:
                    raise TargetError(f"{response.url} answers with {response.status}; name the model")
                listed = await response.json(content_type=None)
            return str(listed["data"][0]["id"])
        except (aiohttp.ClientError, TimeoutError) as error:
            if limit.expired():
                raise TargetError(f"no answer to {self.url}/models within {self._probe_timeout_s:g} s") from error
            raise TargetError(_described(error)) from error
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise TargetError(f"{self.url}/models lists no model; name it") from error

    async def _chunks(self, body: dict[str, Any], end: "_End") -> AsyncIterator[dict[str, Any]]:
        """The stream's JSON objects, as they come; `end` is told how it ended. Raises TargetError if it breaks."""
        assert self._session is not None
        try:
            async with self._session.post(f"{self.url}/completions", json=body) as response:
                if response.status != 200:
                    text = " ".join((await response.text()).split())[:_SHOWN_ERROR_CHARS]
                    kind = _RefusedError if response.status in _REFUSALS else TargetError
                    raise kind(f"HTTP {response.status}: {text}")
                async for line in response.content:
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        end.said_done = True
                        return
                    chunk = json.loads(data)
                    if not isinstance(chunk, dict):
                        raise TargetError("an event is no JSON object")
                    choices = chunk.get("choices") or []
                    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
                        raise TargetError("the choices of an event are no list of objects")
                    if chunk.get("error"):
                        raise TargetError(f"error event: {json.dumps(chunk['error'])[:_SHOWN_ERROR_CHARS]}")
                    end.finish_reason = _finish_reason(chunk) or end.finish_reason
                    yield chunk
        except (aiohttp.ClientError, ConnectionError) as error:
            raise TargetError(_described(error)) from error
        except ValueError as error:
            raise TargetError(f"an event cannot be read: {error}") from error


@dataclass(slots=True)
class _End:
    """How a stream ended."""

    said_done: bool = False
    finish_reason: str | None = None

    def check(self, dialect: Dialect) -> None:
        """Raises TargetError unless it ended as this server's streams do."""
        if not self.said_done and (dialect.done or self.finish_reason is None):
            raise TargetError("the stream ended without [DONE]")


def agree_on_prompts(targets: Sequence[HttpTarget]) -> list[str]:
    """Where one of the servers takes no token ids, all get words: prompts are the same for all. Returns the names of
    those that take none."""
    refusing = [target.name for target in targets if not target.dialect.token_ids]
    if refusing:
        for target in targets:
            target.use_text()
    return refusing


def _size(choice: dict[str, Any]) -> int:
    """Characters, or token ids if those are more. 0: chunks that only end an answer or state a role carry no token."""
    parts = (choice.get("text"), choice.get("token_ids"))
    return max(len(part) if isinstance(part, str | list) else 0 for part in parts)


def _finish_reason(chunk: dict[str, Any]) -> str | None:
    return next((reason for choice in chunk.get("choices") or () if (reason := choice.get("finish_reason"))), None)


def _described(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
