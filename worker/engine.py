"""The engine: scheduler, cache, model runner and sampler wired together. It sees token ids, never text.

One thread drives it: add requests, call `step` while `has_unfinished`, hand the events on.
"""

import secrets
import sys
import time
from collections.abc import Callable

from kv_cache import NULL_BLOCK, BlockManager
from scheduler import (
    RequestTooLargeError,
    ScheduledChunk,
    Scheduler,
    SchedulerOutputs,
    SequenceEnd,
    SequenceStatus,
)
from scheduler.records import StepRecord
from worker.config import EngineConfig
from worker.device import open_device
from worker.engine_lives import EngineLives
from worker.engine_totals import EngineTotals
from worker.grammar.errors import GrammarBusyError, GrammarError
from worker.grammar.requests import RequestGrammars
from worker.loading import LoadedModel, load_runner
from worker.open_request import OpenRequest, beam_search_of, scheduler_request
from worker.overlap import RunningStep, may_plan_past, rows_that_go_on
from worker.prefix_keys import PrefixKeys
from worker.prompt_scores import PromptScores, score_prompts
from worker.rates import PrefillRate, StepSpeed, measure_swap_rates
from worker.recorder import open_recorder
from worker.request_checks import RequestError, checked_outputs
from worker.sampler import Sampler
from worker.step_sampling import LaunchedSamples, StepSampler
from worker.types import EngineLoad, EngineRequest, TokenEvent

#: tokens of the step that is run before the engine takes requests, so that the first one finds everything warm
NUM_WARM_UP_TOKENS = 32
NO_NUMBERS = "the model computed NaN, or no score above minus infinity, for this request"


class Engine:
    """Every accepted request ends with exactly one event for each of its samples that has a finish reason."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """Loads the model and runs it once. Raises ConfigError and the loaders' errors, which name what is wrong."""
        self._wire(load_runner(config), clock)
        if self.num_host_blocks:
            print(self.swap_rates.note(self.num_block_bytes), file=sys.stderr, flush=True)

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
        self.attention_backend = facts.attention_backend
        self.block_size = config.block_size
        self.num_device_blocks = config.num_device_blocks
        self.num_host_blocks = config.num_host_blocks
        self.block_manager = BlockManager(config.block_size, config.num_device_blocks, config.num_host_blocks)
        self._recorder = open_recorder(config.record)
        self.scheduler = Scheduler(config.scheduler_config(), self.block_manager, self._recorder)
        self.lives = EngineLives(clock, is_fair=self.scheduler.share is not None)
        self._device = open_device(loaded.tensor_pool.device)
        sampler = Sampler(facts.vocab_size, facts.eos_token_ids, loaded.tensor_pool.device)
        self._step_sampler = StepSampler(sampler, facts.vocab_size, config.block_size)
        self._keys: PrefixKeys | None = None
        if config.enable_prefix_caching:
            secret = config.prefix_cache_secret.encode() or secrets.token_bytes(32)
            self._keys = PrefixKeys(secret, config.block_size)
        self.grammars = RequestGrammars(facts.folder, facts.vocab_size, facts.eos_token_ids)
        self._open: dict[str, OpenRequest] = {}
        self._plans_ahead = config.async_scheduling
        #: the step that still runs while the next one is planned, where steps are planned ahead
        self._running: RunningStep | None = None
        self._events: list[TokenEvent] = []
        self.totals = EngineTotals()
        self._prefill_rate = PrefillRate()
        self._speed = StepSpeed()
        self.swap_rates = measure_swap_rates(loaded.tensor_pool, clock)
        self._warm_up()

    # -- requests ------------------------------------------------------------------------------------------------

    def add_request(self, request: EngineRequest, now: float) -> None:
        """Queue a request that arrived at `now`. Raises RequestError for what can never run here. Waits for a grammar
        that is not compiled: see `grammars.prepare`."""
        if request.request_id in self._open:
            raise RequestError(f"request {request.request_id} is already here")
        params, outputs = request.params, checked_outputs(request, self.vocab_size)
        scores: PromptScores | None = None
        if params.prompt_logprobs is not None and not any(outputs):  # with output, they have been told
            scores = PromptScores(request.prompt_token_ids, params.prompt_logprobs)
        # What the cache holds is not computed, and then it has no scores.
        keys = self._keys if scores is None else None
        try:
            matchers = self.grammars.matchers(request, outputs)
            group = self.scheduler.add(scheduler_request(request, self.eos_token_ids, self.max_model_len, keys, now))
        except RequestTooLargeError as error:
            raise RequestError(str(error)) from error
        except (GrammarError, GrammarBusyError) as error:
            raise RequestError(f"grammar: {error}") from error
        self.lives.arrived(request, group, now)
        self._open[request.request_id] = OpenRequest(
            params,
            request.prompt_token_ids,
            outputs,
            group,
            keys,
            beam_search_of(request, self.eos_token_ids, self.max_model_len),
            scores,
            matchers,
        )

    def abort(self, request_id: str) -> None:
        """Drop a request. Unknown and ended ones are left alone."""
        self._report(self.scheduler.abort(request_id))

    def finish(self, request_id: str, index: int, num_tokens: int) -> None:
        """The sample ended outside, after its first `num_tokens` tokens; what came after them is overrun."""
        request = self._open.get(request_id)
        if request is not None and request.beam is None and 0 <= index < request.params.n:
            self._report(self.scheduler.finish(request_id, index))

    # -- steps ---------------------------------------------------------------------------------------------------

    def has_unfinished(self) -> bool:
        """Whether `step` has something to do, be it only to report the end of an aborted request."""
        return self.scheduler.has_unfinished() or bool(self._events)

    def step(self, now: float) -> list[TokenEvent]:
        """Plan at `now` (seconds), move blocks, run, sample and settle one step; returns its events. With
        `async_scheduling` the step that is sampled and settled is the one before, which ran meanwhile (`overlap`)."""
        self.lives.tell(self._events, self._open)  # of those that ended since the last step
        if self._running is not None and not may_plan_past(self._running.outputs.chunks, self._open):
            self._settle(self._sample())
            now = self._clock()
        outputs = self.scheduler.schedule(now)
        planned = self.scheduler.records.newest
        self._report(outputs.ended)
        prepared = self._runner.prepare(outputs)
        before = self._sample()
        launched: RunningStep | None = None
        if not outputs.is_empty:
            self._move_blocks(outputs, planned)
            logits = self._runner.run(prepared, None if before is None else before.on_device())
            launched = RunningStep(outputs, planned, logits, self._device.record())
        self._settle(before)
        if launched is None:
            self.lives.settled(planned)
        self._running = launched
        if not self._plans_ahead:
            self._settle(self._sample())
        events, self._events = self._events, []
        self.lives.tell(events, self._open)
        return events

    def _move_blocks(self, outputs: SchedulerOutputs, record: StepRecord) -> None:
        out, into, copy = outputs.blocks_to_swap_out, outputs.blocks_to_swap_in, outputs.blocks_to_copy
        if out or into or copy:
            began_s = self._clock()
            self._tensor_pool.swap(out, into, copy)
            record.swap_s = self._clock() - began_s

    def _sample(self) -> LaunchedSamples | None:
        """Launch the choice of tokens of the step that runs, if one does."""
        if self._running is None:
            return None
        chunks = [chunk for chunk in self._running.outputs.chunks if chunk.do_sample]
        rows = rows_that_go_on(chunks, self._open) if self._plans_ahead else enumerate(chunks)
        return self._step_sampler.launch(self._open, self._running.logits, rows)

    def _settle(self, samples: LaunchedSamples | None) -> None:
        """Wait for the step that runs and its `samples`, tell the scheduler, and make its events."""
        if self._running is None or samples is None:
            return
        outputs, record = self._running.outputs, self._running.record
        if samples.sampled is None:
            self._running.ended.wait()
        self._running = None
        unscored = self._score_prompts(outputs.chunks) if outputs.num_prefill_tokens else set()
        sampled = self._step_sampler.collect(samples)
        self._events += sampled.events
        for request_id in unscored | sampled.broken:
            self._fail(request_id)
        newest = {(event.request_id, event.index): event for event in self._events}
        ends = self.scheduler.update(
            outputs.step_id,
            sampled.token_ids,
            self._clock(),
            block_keys=sampled.block_keys,
            beams={request_id: choices for request_id, choices in sampled.beams.items() if choices},
        )
        for end in ends:
            newest[end.request_id, end.index].finish_reason = end.finish_reason
        self._forget_ended({end.request_id for end in ends})
        for request_id, choices in sampled.beams.items():
            if not choices:
                self._end_beams(request_id)
        self.lives.settled(record)
        self._count(record)

    def _score_prompts(self, chunks: list[ScheduledChunk]) -> set[str]:
        """The requests for which the model computed no numbers."""

        def scores_of(chunk: ScheduledChunk) -> PromptScores | None:
            request = self._open.get(chunk.request_id)
            return request.scores if request is not None and request.goes_on(chunk.seq_id) else None

        return score_prompts(chunks, scores_of, self._runner.logits_of, self.vocab_size)

    def _fail(self, request_id: str) -> None:
        """End a request that cannot go on, for its grammar or for want of numbers, and nobody else's."""
        request = self._open[request_id]
        for event in request.end_events(self.scheduler.end(request_id, SequenceStatus.FINISHED_IGNORED)):
            event.error = request.failure or NO_NUMBERS
            event.is_refusal = request.failure is not None
            self._events.append(event)
        self._forget_ended({request_id})

    def _end_beams(self, request_id: str) -> None:
        self._events += self._open[request_id].beam_events()
        self.scheduler.end(request_id, SequenceStatus.FINISHED_STOPPED)
        del self._open[request_id]

    def _report(self, ends: list[SequenceEnd]) -> None:
        """Events for samples that ended without a token."""
        by_request: dict[str, list[SequenceEnd]] = {}
        for end in ends:
            by_request.setdefault(end.request_id, []).append(end)
        for request_id, own_ends in by_request.items():
            self._events += self._open[request_id].end_events(own_ends)
        self._forget_ended(set(by_request))

    def _forget_ended(self, request_ids: set[str]) -> None:
        for request_id in request_ids:
            if self._open[request_id].group.is_finished:
                del self._open[request_id]

    def _count(self, record: StepRecord) -> None:
        self._speed.learn(record)
        if self._prefill_rate.learn(record):
            self.scheduler.set_rates(self._prefill_rate.tokens_per_s, self.swap_rates.blocks_per_s)
        self.totals.count(record)

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
            num_cached_blocks=blocks.num_cached_device_blocks,
            reference_step_s=self._speed.reference_step_s,
        )

    @property
    def num_block_bytes(self) -> int:
        """What one block holds of all layers."""
        return self._tensor_pool.num_block_bytes

    def records_since(self, step_id: int) -> list[StepRecord]:
        return self.scheduler.records.since(step_id)

    def close(self) -> None:
        """End the recording, if there is one, and what tries grammars."""
        self.grammars.close()
        if self._recorder is not None:
            self._recorder.close()

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
        self._runner.run(self._runner.prepare(SchedulerOutputs(0, [chunk])))
