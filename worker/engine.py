"""The engine: scheduler, cache, model runner and sampler wired together. It sees token ids, never text.

One thread drives it: add requests, call `step` while `has_unfinished`, hand the events on.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from kv_cache import NULL_BLOCK, BlockManager
from scheduler import RequestTooLargeError, ScheduledChunk, Scheduler, SchedulerOutputs, SequenceEnd, StopRules
from scheduler.records import StepRecord
from scheduler.sequence import SequenceGroup
from worker.config import EngineConfig
from worker.loading import LoadedModel, load_runner
from worker.sampler import SampledToken, Sampler, SampleRow
from worker.types import EngineLoad, EngineRequest, SamplingParams, TokenEvent

#: tokens of the step that is run before the engine takes requests, so that the first one finds everything warm
NUM_WARM_UP_TOKENS = 32


class RequestError(ValueError):
    """The engine refuses this request; the message is for the client."""


@dataclass(slots=True)
class EngineTotals:
    """What happened since the engine was made."""

    num_steps: int = 0
    num_prefill_chunks: int = 0
    num_preemptions_recompute: int = 0
    num_preemptions_swap: int = 0
    num_blocks_swapped_out: int = 0
    num_blocks_swapped_in: int = 0
    num_discarded_tokens: int = 0


@dataclass(slots=True, eq=False)
class _OpenRequest:
    """A request that the scheduler holds. `output_token_ids` is what the sampler's penalties read."""

    params: SamplingParams
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    group: SequenceGroup


class Engine:
    """Every accepted request ends with exactly one event that has a finish reason."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """Loads the model and runs it once. Raises ConfigError and the loaders' errors, which name what is wrong."""
        self._wire(load_runner(config), clock)

    def _wire(self, loaded: LoadedModel, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._runner = loaded.runner
        self._tensor_pool = loaded.tensor_pool
        facts, config = loaded.facts, loaded.config
        self.config = config
        self.tokenizer_folder = facts.folder
        self.vocab_size = facts.vocab_size
        self.eos_token_ids = facts.eos_token_ids
        self.max_model_len = facts.max_model_len
        self.generation_defaults = facts.generation_defaults
        self.block_size = config.block_size
        self.num_device_blocks = config.num_device_blocks
        self.num_host_blocks = config.num_host_blocks
        self.block_manager = BlockManager(config.block_size, config.num_device_blocks, config.num_host_blocks)
        self.scheduler = Scheduler(config.scheduler_config(), self.block_manager)
        self._sampler = Sampler(facts.vocab_size, facts.eos_token_ids, loaded.tensor_pool.device)
        self._open: dict[str, _OpenRequest] = {}
        self._events: list[TokenEvent] = []
        self.totals = EngineTotals()
        self._warm_up()

    # -- requests ------------------------------------------------------------------------------------------------

    def add_request(self, request: EngineRequest, now: float) -> None:
        """Queue a request that arrived at `now`. Raises RequestError for what can never run here."""
        params = request.params
        if params.n != 1:
            raise RequestError(f"n: {params.n} is not available yet, only 1")
        if not request.prompt_token_ids:
            raise RequestError("the prompt is empty")
        if request.request_id in self._open:
            raise RequestError(f"request {request.request_id} is already here")
        output_token_ids = list(request.output_token_ids[0]) if request.output_token_ids else []
        if params.max_tokens <= len(output_token_ids):
            raise RequestError(f"max_tokens: {params.max_tokens} leaves nothing to generate")
        stop_token_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_token_ids |= frozenset(self.eos_token_ids)
        rules = StopRules(params.max_tokens, self.max_model_len, params.min_tokens, stop_token_ids)
        try:
            group = self.scheduler.add(
                request.request_id, request.prompt_token_ids, rules, now, output_token_ids
            )
        except RequestTooLargeError as error:
            raise RequestError(str(error)) from error
        self._open[request.request_id] = _OpenRequest(params, request.prompt_token_ids, output_token_ids, group)

    def abort(self, request_id: str) -> None:
        """Drop a request. Unknown and ended ones are left alone."""
        self._report(self.scheduler.abort(request_id))

    def finish(self, request_id: str, index: int, num_tokens: int) -> None:
        """The sample ended outside, after its first `num_tokens` tokens; what came after them is overrun."""
        self._report(self.scheduler.finish(request_id, index))

    # -- steps ---------------------------------------------------------------------------------------------------

    def has_unfinished(self) -> bool:
        """Whether `step` has something to do, be it only to report the end of an aborted request."""
        return self.scheduler.has_unfinished() or bool(self._events)

    def step(self, now: float) -> list[TokenEvent]:
        """Plan at `now` (seconds), move blocks, run, sample and settle one step; returns its events."""
        outputs = self.scheduler.schedule(now)
        self._report(outputs.ended)
        if not outputs.is_empty:
            self._tensor_pool.swap(
                outputs.blocks_to_swap_out, outputs.blocks_to_swap_in, outputs.blocks_to_copy
            )
            logits = self._runner.execute(outputs)
            sampling_chunks = [chunk for chunk in outputs.chunks if chunk.do_sample]
            sampled = self._sampler.sample(logits, self._sample_rows(sampling_chunks))
            self._settle(outputs, sampling_chunks, sampled)
        events, self._events = self._events, []
        return events

    def _sample_rows(self, chunks: list[ScheduledChunk]) -> list[SampleRow]:
        rows: list[SampleRow] = []
        for logits_row, chunk in enumerate(chunks):
            request = self._open[chunk.request_id]
            position = chunk.start + len(chunk.token_ids)
            rows.append(
                SampleRow(
                    logits_row, request.params, 0, position, request.prompt_token_ids, request.output_token_ids
                )
            )
        return rows

    def _settle(
        self, outputs: SchedulerOutputs, chunks: list[ScheduledChunk], sampled: list[SampledToken]
    ) -> None:
        samples = {chunk.seq_id: [token.token_id] for chunk, token in zip(chunks, sampled, strict=True)}
        for chunk, token in zip(chunks, sampled, strict=True):
            request = self._open[chunk.request_id]
            request.output_token_ids.append(token.token_id)
            logprobs = None if token.logprobs is None else [token.logprobs]
            self._events.append(TokenEvent(chunk.request_id, 0, [token.token_id], logprobs))
        newest = {event.request_id: event for event in self._events}
        for end in self.scheduler.update(outputs.step_id, samples, self._clock()):
            newest[end.request_id].finish_reason = end.finish_reason
            del self._open[end.request_id]
        self._count(self.scheduler.records.newest)

    def _report(self, ends: list[SequenceEnd]) -> None:
        for end in ends:
            is_refusal = end.error is not None
            self._events.append(
                TokenEvent(end.request_id, end.index, [], None, end.finish_reason, end.error, is_refusal)
            )
            del self._open[end.request_id]

    def _count(self, record: StepRecord) -> None:
        totals = self.totals
        totals.num_steps += 1
        totals.num_prefill_chunks += len(record.prefill_chunks)
        totals.num_blocks_swapped_out += record.num_blocks_swapped_out
        totals.num_blocks_swapped_in += record.num_blocks_swapped_in
        for preemption in record.preemptions:
            totals.num_preemptions_swap += preemption.mode == "swap"
            totals.num_preemptions_recompute += preemption.mode == "recompute"
            totals.num_discarded_tokens += preemption.num_discarded_tokens

    # -- state ---------------------------------------------------------------------------------------------------

    def load(self) -> EngineLoad:
        queues, blocks = self.scheduler.queues, self.block_manager
        return EngineLoad(
            num_waiting=len(queues.waiting),
            num_running=len(queues.running),
            num_swapped=len(queues.swapped),
            num_queued_tokens=self.scheduler.num_queued_tokens(),
            num_free_blocks=blocks.num_free_device_blocks,
            num_used_blocks=blocks.num_used_device_blocks,
            num_free_host_blocks=blocks.num_free_host_blocks,
            num_used_host_blocks=blocks.num_used_host_blocks,
        )

    def records_since(self, step_id: int) -> list[StepRecord]:
        return self.scheduler.records.since(step_id)

    def check_integrity(self) -> None:
        """Assert that an idle engine holds no block."""
        self.block_manager.check_integrity()
        assert self.block_manager.num_used_device_blocks == 0
        assert self.block_manager.num_used_host_blocks == 0

    def _warm_up(self) -> None:
        """One step through the model, written into blocks that nobody holds yet."""
        num_blocks = self.num_device_blocks - (NULL_BLOCK + 1)
        num_tokens = min(
            NUM_WARM_UP_TOKENS, self.config.max_num_batched_tokens, self.max_model_len, num_blocks * self.block_size
        )
        table = list(range(NULL_BLOCK + 1, num_blocks + NULL_BLOCK + 1))
        chunk = ScheduledChunk("warm-up", 0, 0, [0] * num_tokens, table, True, True)
        self._runner.execute(SchedulerOutputs(0, [chunk]))
