"""`LLM`: the engine in process, text in and text out, for offline batches and scripts.

Owns the loop around `Engine.step` and the way from prompts to completions. Knows nothing of scheduling or serving.
"""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from worker.config import EngineConfig
from worker.engine import Engine, EngineTotals
from worker.request_checks import RequestError, check_token_ids
from worker.sampling_choices import SamplingChoices
from worker.text import Tokenizer
from worker.types import EngineRequest, PromptTokenLogprobs, SamplingParams, TokenEvent, TokenLogprobs

#: called after each step with (completions finished, completions in all, tokens generated so far)
Progress = Callable[[int, int, int], None]
#: chat messages, oldest first: mappings with `role` and `content`
Conversation = Sequence[Mapping[str, Any]]


class EngineLike(Protocol):
    """What `LLM` needs of an engine."""

    tokenizer_folder: Path
    vocab_size: int
    max_model_len: int
    generation_defaults: Mapping[str, Any]
    totals: EngineTotals

    def add_request(self, request: EngineRequest, now: float) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def step(self, now: float) -> list[TokenEvent]: ...
    def has_unfinished(self) -> bool: ...


@dataclass(slots=True)
class Completion:
    """One answer, the one with this `index` of its prompt's. `token_ids` includes the token that ended it; `text`
    leaves out special and stop tokens. `prompt_logprobs` are of the prompt's tokens from the second on.

    finish_reason: "stop", "length", or "error" (then `error` says why).
    """

    prompt: str
    prompt_token_ids: list[int]
    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[PromptTokenLogprobs] | None = None
    error: str | None = None


class LLM:
    """Loads the model when it is made. One call at a time; none leaves a request behind, however it ends."""

    def __init__(
        self,
        config: EngineConfig,
        chat_template: str | None = None,
        build_engine: Callable[[EngineConfig], EngineLike] = Engine,
    ) -> None:
        self._engine = build_engine(config)
        self._tokenizer = Tokenizer(self._engine.tokenizer_folder, chat_template)
        self._request_numbers = count()

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        params: SamplingChoices | SamplingParams | None = None,
        progress: Progress | None = None,
    ) -> list[Completion]:
        """Completions of text or token prompts, in their order; `n` of each prompt in a row.

        Choices are filled in per prompt, with the model's defaults and, if they name no seed, with one of its own;
        `SamplingParams` are taken as they are. Raises `RequestError` before anything has run if a prompt can never fit.
        """
        encoded: list[tuple[str, list[int]]] = []
        for prompt in prompts:
            if isinstance(prompt, str):
                encoded.append((prompt, self._tokenizer.encode(prompt)))
            else:
                token_ids = list(prompt)
                check_token_ids(token_ids, self._engine.vocab_size)
                encoded.append((self._tokenizer.decode(token_ids, skip_special_tokens=False), token_ids))
        return self._run(encoded, params or SamplingChoices(), progress)

    def chat(
        self,
        conversations: Sequence[Conversation],
        params: SamplingChoices | SamplingParams | None = None,
        progress: Progress | None = None,
    ) -> list[Completion]:
        """Answers to conversations, as `generate` gives them; `prompt` is what the chat template made of each.

        Raises `ChatTemplateError` where the template refuses a conversation.
        """
        encoded: list[tuple[str, list[int]]] = []
        for conversation in conversations:
            token_ids = self._tokenizer.encode_chat(conversation)
            encoded.append((self._tokenizer.decode(token_ids, skip_special_tokens=False), token_ids))
        return self._run(encoded, params or SamplingChoices(), progress)

    def stats(self) -> dict[str, Any]:
        """What the engine has done since it was made."""
        totals = self._engine.totals
        return {
            "steps": totals.num_steps,
            "prefill_chunks": totals.num_prefill_chunks,
            "preemptions": {
                "recompute": totals.num_preemptions_recompute,
                "swap": totals.num_preemptions_swap,
            },
            "swapped_blocks": {"out": totals.num_blocks_swapped_out, "in": totals.num_blocks_swapped_in},
            "discarded_tokens": totals.num_discarded_tokens,
            "prefix_cache": {"queried_blocks": totals.num_blocks_queried, "hit_blocks": totals.num_blocks_hit},
        }

    def _run(
        self,
        prompts: list[tuple[str, list[int]]],
        params: SamplingChoices | SamplingParams,
        progress: Progress | None,
    ) -> list[Completion]:
        """`prompts`: the text and the tokens of each."""
        completions = [
            Completion(text, token_ids, index) for text, token_ids in prompts for index in range(params.n)
        ]
        num_open: dict[str, int] = {}
        by_request: dict[str, list[Completion]] = {}
        try:
            for place, (_, token_ids) in enumerate(prompts):
                request_id = f"llm-{next(self._request_numbers)}"
                request = EngineRequest(request_id, token_ids, self._params_for(token_ids, params))
                try:
                    self._engine.add_request(request, time.monotonic())
                except RequestError as error:
                    raise RequestError(f"prompt {place + 1} of {len(prompts)}: {error}") from error
                num_open[request_id] = params.n
                by_request[request_id] = completions[place * params.n : (place + 1) * params.n]
            num_tokens = 0
            while num_open:
                assert self._engine.has_unfinished(), "the engine forgot a request"
                for event in self._engine.step(time.monotonic()):
                    if event.request_id not in num_open:  # of a call before this one, that was interrupted
                        continue
                    completion = by_request[event.request_id][event.index]
                    num_tokens += len(event.token_ids)
                    _add_event(completion, event)
                    if event.prompt_logprobs is not None:
                        for answer in by_request[event.request_id]:
                            answer.prompt_logprobs = event.prompt_logprobs
                    if event.finish_reason is not None:
                        completion.text = self._text_of(completion)
                        num_open[event.request_id] -= 1
                        if num_open[event.request_id] == 0:
                            del num_open[event.request_id]
                if progress is not None:
                    progress(len(completions) - sum(num_open.values()), len(completions), num_tokens)
        finally:
            for request_id in num_open:
                self._engine.abort(request_id)
        return completions

    def _params_for(self, prompt_token_ids: list[int], params: SamplingChoices | SamplingParams) -> SamplingParams:
        if isinstance(params, SamplingParams):
            return params
        return params.resolve(
            self._engine.generation_defaults,
            # A prompt that leaves no room at all is the engine's to refuse.
            max_tokens=max(1, self._engine.max_model_len - len(prompt_token_ids)),
            vocab_size=self._engine.vocab_size,
            random_seed=secrets.randbits(63),
        )

    def _text_of(self, completion: Completion) -> str:
        ends_in_stop_token = completion.finish_reason == "stop"
        shown = completion.token_ids[:-1] if ends_in_stop_token else completion.token_ids
        return self._tokenizer.decode(shown)


def _add_event(completion: Completion, event: TokenEvent) -> None:
    completion.token_ids += event.token_ids
    if event.logprobs is not None:
        completion.logprobs = (completion.logprobs or []) + event.logprobs
    completion.finish_reason = event.finish_reason
    completion.error = event.error
