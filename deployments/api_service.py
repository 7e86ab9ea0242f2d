"""`ApiService`: from a checked request to jobs that run. Owns tokenizing, limits and the requests' ids.

Knows neither routes nor the shapes of responses.
"""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from deployments.admission import Admission
from deployments.answer_meter import AnswerMeter, ApiMetrics
from deployments.answer_runs import AnswerRunner, Job
from deployments.answers import Answer, Delta, TextOptions
from deployments.dashboard_source import DashboardSource
from deployments.explain.desk import ExplainDesk, no_others
from deployments.explain.journeys import Journeys
from deployments.grammar_checks import check_grammar, grammar_checks
from deployments.keys import ANYBODY, Caller, KeyRing
from deployments.prompt_entries import prompt_text
from deployments.protocol.choices import check_limits
from deployments.protocol.errors import bad_request, model_not_found
from deployments.protocol.fields import MAX_PRIORITY, Prompt
from deployments.protocol.requests import ChatRequest, CompletionRequest, GenerationRequest
from deployments.protocol.sampling import check_token_ids, sampling_params
from deployments.request_log import NO_LOG, RequestLog
from deployments.tool_calls.chats import ChatForms
from deployments.tool_calls.first_call import until_first_call
from deployments.worker_client import WorkerClient
from worker.text import ChatTemplateError, Tokenizer
from worker.types import EngineRequest, GrammarSpec

T = TypeVar("T")

#: tokenizing more characters than this takes longer than other requests should wait
_TOKENIZE_ON_LOOP_CHARS = 2048


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """`vocab_size` is the model's: ids of prompts must be below it. `generation_defaults` are its own sampling
    defaults (temperature, top_k, top_p, min_p, repetition_penalty); absent ones are OpenAI's. `max_n` bounds the
    answers to a prompt, `max_sequences` those of a call. `most_urgent_priority`: no request is more urgent, whatever
    it asks. `request_timeout_s`: no request takes longer, whatever it asks; 0: as long as it takes. `keep_alive_s`: a
    stream is not silent for longer; 0: off. `max_open_requests`: calls that may be open; 0: no limit. With `keys` every
    route but those of `key_check.OPEN_ROUTES` wants one of them."""

    served_model_name: str
    max_model_len: int
    vocab_size: int
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)
    max_body_bytes: int = 4 * 1024 * 1024
    max_prompts: int = 64
    max_n: int = 64
    max_sequences: int = 1024
    most_urgent_priority: int = -MAX_PRIORITY
    tenant_header: str | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    keys: KeyRing | None = None
    request_timeout_s: float = 0.0
    keep_alive_s: float = 0.0
    max_open_requests: int = 0
    system_fingerprint: str = "stallfree"


class ApiService:
    """What the routes of one ingress use. `is_ready`, `is_any_worker` (without asking anybody), `metrics_text` and
    `dashboard` come from whoever knows the cluster."""

    def __init__(
        self,
        client: WorkerClient,
        tokenizer: Tokenizer,
        settings: ApiSettings,
        metrics: ApiMetrics,
        *,
        is_ready: Callable[[], Awaitable[bool]],
        metrics_text: Callable[[], Awaitable[str]],
        dashboard: DashboardSource,
        is_any_worker: Callable[[], bool] = lambda: True,
        request_log: RequestLog = NO_LOG,
        explain: ExplainDesk | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.settings = settings
        self.metrics_text = metrics_text
        self.dashboard = dashboard
        self.count_rejection = metrics.request_rejected
        self.admission = Admission(settings.max_open_requests, metrics.request_rejected, is_any_worker)
        self._is_ready = is_ready
        self.explain = explain or ExplainDesk(Journeys(), no_others)
        self._runner = AnswerRunner(client, self.admission, self.explain.journeys, request_log)
        self._metrics = metrics
        self.chats = ChatForms(tokenizer, settings.tool_call_parser, settings.reasoning_parser)
        self.grammars = grammar_checks(tokenizer, settings.vocab_size)

    async def is_ready(self) -> bool:
        return not self.admission.is_draining and await self._is_ready()

    async def completion_jobs(
        self, request: CompletionRequest, arrival_s: float, caller: Caller = ANYBODY
    ) -> list[Job]:
        self._check(request, len(request.prompt))
        if not request.prompt:
            raise bad_request("prompt: must not be empty", "prompt")
        if len(request.prompt) > self.settings.max_prompts:
            raise bad_request(f"prompt: at most {self.settings.max_prompts} prompts in one request", "prompt")
        await check_grammar(self.grammars, request.grammar)
        num_chars = sum(len(prompt) for prompt in request.prompt)
        prompts = await self.off_loop(num_chars, lambda: [self._prompt_ids(prompt) for prompt in request.prompt])
        base_id = f"cmpl-{uuid.uuid4().hex}"
        jobs = []
        for index, (prompt, token_ids) in enumerate(zip(request.prompt, prompts, strict=True)):
            echoed = prompt_text(self.tokenizer, prompt) if request.echo else ""
            request_id = base_id if len(prompts) == 1 else f"{base_id}-{index}"
            meter = AnswerMeter(self._metrics, arrival_s, len(token_ids), caller.tenant)
            jobs.append(self._job(request, request_id, index, token_ids, "prompt", meter, caller, echoed))
        return jobs

    async def chat_jobs(
        self, request: ChatRequest, arrival_s: float, caller: Caller = ANYBODY, id_prefix: str = "chatcmpl-"
    ) -> list[Job]:
        self._check(request, 1)
        forced = self.chats.forced_grammar(request)
        await check_grammar(self.grammars, request.grammar if forced is None else (forced, "tool_choice"))
        token_ids = await self.prompt_ids(request)
        meter = AnswerMeter(self._metrics, arrival_s, len(token_ids), caller.tenant)
        job = self._job(
            request,
            f"{id_prefix}{uuid.uuid4().hex}",
            0,
            token_ids,
            "messages",
            meter,
            caller,
            forced_grammar=forced,
            shows_special_tokens=self.chats.shows_special_tokens(request),
            until=until_first_call(self.chats.parts(request, token_ids)),
        )
        return [job]

    async def prompt_ids(self, chat: ChatRequest, *, add_generation_prompt: bool = True) -> list[int]:
        """What the model is given of a chat: its messages, functions to call, and variables of the template."""
        plain, options = self.chats.prompt(chat.messages, chat.offered_functions)
        options |= chat.template_arguments
        try:
            # Off the loop however short it is: how long a template takes is the template's matter.
            token_ids = await asyncio.to_thread(
                lambda: self.tokenizer.encode_chat(plain, add_generation_prompt=add_generation_prompt, **options)
            )
        except ChatTemplateError as error:
            raise bad_request(f"messages: {error}", "messages") from error
        if not token_ids:
            raise bad_request("messages: the chat template made an empty prompt of them", "messages")
        return token_ids

    def run(self, jobs: list[Job], accepted: asyncio.Event | None = None) -> AsyncGenerator[Delta, None]:
        """As `AnswerRunner.run`."""
        return self._runner.run(jobs, accepted)

    def _job(
        self,
        request: GenerationRequest,
        request_id: str,
        prompt_index: int,
        token_ids: list[int],
        prompt_param: str,
        meter: AnswerMeter,
        caller: Caller,
        echoed: str = "",
        *,
        forced_grammar: GrammarSpec | None = None,
        shows_special_tokens: bool = False,
        until: Callable[[], Callable[[str], bool]] | None = None,
    ) -> Job:
        """Choices are numbered prompt after prompt. `echoed` is the prompt's text where it comes before each answer."""
        settings = self.settings
        params = sampling_params(
            request,
            num_prompt_tokens=len(token_ids),
            prompt_param=prompt_param,
            max_model_len=settings.max_model_len,
            vocab_size=settings.vocab_size,
            generation_defaults=settings.generation_defaults,
        )
        if forced_grammar is not None:
            params = replace(params, grammar=forced_grammar)
        options = TextOptions(
            stop=tuple(request.stop or ()),
            include_stop_str=bool(request.include_stop_str_in_output),
            skip_special_tokens=request.skip_special_tokens is not False and not shows_special_tokens,
            min_tokens=params.min_tokens,
            until=until,
        )
        first = prompt_index * params.n
        return Job(
            EngineRequest(
                request_id,
                token_ids,
                params,
                priority=max(request.priority or 0, settings.most_urgent_priority, caller.most_urgent_priority),
                tenant=caller.tenant,
                cache_salt=request.cache_salt or "",
            ),
            [Answer(first + sample, self.tokenizer, options, echoed) for sample in range(params.n)],
            meter,
            _shorter(request.timeout, settings.request_timeout_s),
            caller,
        )

    def _check(self, request: GenerationRequest, num_prompts: int) -> None:
        """What needs no tokens: the model, and limits before anything is made."""
        self.check_model(request.model)
        check_limits(
            request,
            num_prompts=num_prompts,
            max_n=self.settings.max_n,
            max_sequences=self.settings.max_sequences,
        )

    def check_model(self, model: str | None) -> None:
        """None: whichever there is, for routes that do not insist on a name."""
        if model is not None and model != self.settings.served_model_name:
            raise model_not_found(self.settings.served_model_name)

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            token_ids = self.tokenizer.encode(prompt)
        else:
            token_ids = prompt
            check_token_ids(token_ids, self.settings.vocab_size, "prompt")
        if not token_ids:
            raise bad_request("prompt: must not be empty", "prompt")
        return token_ids

    async def off_loop(self, num_chars: int, work: Callable[[], T]) -> T:
        """The result of work on so much text, in a thread where it would hold up others."""
        return await asyncio.to_thread(work) if num_chars > _TOKENIZE_ON_LOOP_CHARS else work()


def _shorter(asked_s: float | None, limit_s: float) -> float | None:
    """Of the time a request gives itself and the one the server gives it (0: any); None: neither."""
    if asked_s is None or not limit_s:
        return asked_s or limit_s or None
    return min(asked_s, limit_s)
