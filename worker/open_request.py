"""`OpenRequest`: what the engine remembers of a request beside the scheduler's group.

Owns each sample's output as the sampler reads it, the block keys of growing answers, and the beam search, if any.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from kv_cache import BlockKey
from scheduler import Request, ScheduledChunk, SequenceEnd, SequenceGroup, StopRules
from worker.beam_search import BeamSearch
from worker.grammar.errors import GrammarError
from worker.prefix_keys import PrefixKeys
from worker.prompt_scores import PromptScores
from worker.sampled_rows import SampledToken, SampleRow
from worker.types import EngineRequest, SamplingParams, TokenEvent

if TYPE_CHECKING:
    from worker.grammar.matcher import GrammarMatcher

#: beams end by the rules of the search, not by those of the scheduler
NO_LIMIT = 2**62


@dataclass(slots=True, eq=False)
class OpenRequest:
    """`outputs` holds the tokens of each sample. `keys` is None where the prefix cache is off, or not for this request.
    `scores`: the log-probabilities of its prompt, where they are wanted. `matchers`: by sample, empty without a
    grammar; `failure` says why it cannot be followed any further."""

    params: SamplingParams
    prompt_token_ids: list[int]
    outputs: list[list[int]]
    group: SequenceGroup
    keys: PrefixKeys | None
    beam: BeamSearch | None
    scores: PromptScores | None = None
    matchers: "dict[int, GrammarMatcher]" = field(default_factory=dict)
    failure: str | None = None
    has_told_of_prompt: bool = False

    def sample_rows(self, logits_row: int, chunk: ScheduledChunk) -> list[SampleRow]:
        """One for each sample that takes a token from this chunk."""
        position = chunk.start + len(chunk.token_ids)
        indices = chunk.sample_indices or [self._index_of(chunk.seq_id)]
        return [
            SampleRow(
                logits_row,
                self.params,
                index,
                position,
                self.prompt_token_ids,
                self.outputs[index],
                self._allowed(index),
            )
            for index in indices
        ]

    def _allowed(self, index: int) -> torch.Tensor | None:
        if index not in self.matchers:
            return None
        try:
            return self.matchers[index].allowed()
        except GrammarError as error:
            self.failure = f"grammar: {error}"
            return None

    def take(self, row: SampleRow, token: SampledToken) -> TokenEvent:
        """Remember a sampled token; the event that tells of it. A request for no tokens is told of its prompt alone."""
        if self.params.max_tokens == 0:
            event = TokenEvent(self.group.request_id, row.sample_index, [])
        else:
            self.outputs[row.sample_index].append(token.token_id)
            self._follow(row.sample_index, token.token_id)
            logprobs = None if token.logprobs is None else [token.logprobs]
            event = TokenEvent(self.group.request_id, row.sample_index, [token.token_id], logprobs)
        if not self.has_told_of_prompt:
            event.num_cached_tokens = self.group.num_cached_tokens
            event.prompt_logprobs = None if self.scores is None else self.scores.scored
            self.has_told_of_prompt = True
        return event

    def _follow(self, index: int, token_id: int) -> None:
        if index not in self.matchers:
            return
        try:
            self.matchers[index].accept(token_id)
        except GrammarError as error:
            self.failure = f"grammar: {error}"

    def goes_on(self, seq_id: int) -> bool:
        """Whether it is one of this request's sequences and has not ended."""
        index = self._index_of(seq_id)
        sequences = self.group.sequences
        return 0 <= index < len(sequences) and not sequences[index].status.is_finished

    def seq_id_of(self, sample_index: int) -> int:
        return self.group.sequences[sample_index].seq_id

    def new_block_keys(self, row: SampleRow, token_id: int, block_size: int) -> list[BlockKey]:
        """The key of the block that this token completes, if it completes one."""
        if self.keys is None or (row.position + 1) % block_size:
            return []
        seq = self.group.sequences[row.sample_index if self.group.is_forked else 0]
        parent = seq.block_keys[-1] if seq.block_keys else self.keys.root()
        return self.keys.extend(parent, [*seq.token_ids[row.position + 1 - block_size : row.position], token_id])

    def advance_beams(self, logits: torch.Tensor) -> list[tuple[int, int]]:
        """`logits` [running beams, vocabulary] in the order of the group's live sequences; what goes on:
        (sequence id of the parent, token id)."""
        assert self.beam is not None
        return [(self.group.live[place].seq_id, token_id) for place, token_id in self.beam.advance(logits)]

    def beam_events(self) -> list[TokenEvent]:
        """The best answers, each whole and ended."""
        assert self.beam is not None
        events = [
            TokenEvent(self.group.request_id, index, hypothesis.token_ids, None, hypothesis.finish_reason)
            for index, hypothesis in enumerate(self.beam.best(self.params.n))
        ]
        events[0].num_cached_tokens = self.group.num_cached_tokens
        return events

    def end_events(self, ends: list[SequenceEnd]) -> list[TokenEvent]:
        """What tells of samples that ended without a token: `ends` are those of this request."""
        if self.beam is None:
            return [
                TokenEvent(end.request_id, end.index, [], None, end.finish_reason, end.error, end.error is not None)
                for end in ends
            ]
        if ends[0].finish_reason == "length":
            return self.beam_events()  # cut short by the pool: what there is
        return [
            TokenEvent(end.request_id, index, [], None, end.finish_reason, end.error, end.error is not None)
            for index, end in zip(range(self.params.n), ends, strict=False)
        ]

    def _index_of(self, seq_id: int) -> int:
        return seq_id - self.group.sequences[0].seq_id


def scheduler_request(
    request: EngineRequest, eos_token_ids: tuple[int, ...], max_model_len: int, keys: PrefixKeys | None, now: float
) -> Request:
    """The request as the scheduler takes it. A beam search starts from the prompt, whatever it had produced. A grammar
    decides where an end token may be chosen, so that whichever is chosen ends the answer."""
    params = request.params
    ended_samples = request.ended_samples if params.beam is None else ()
    stop_token_ids = frozenset(params.stop_token_ids)
    has_grammar = params.grammar is not None
    if has_grammar or not params.ignore_eos:
        stop_token_ids |= frozenset(eos_token_ids)
    if params.beam is not None:
        rules = StopRules(NO_LIMIT, NO_LIMIT)
    elif params.max_tokens == 0:
        rules = StopRules(0, max_model_len)  # the token that completes the step is not told, whatever it is
    else:
        rules = StopRules(
            params.max_tokens, max_model_len, 0 if has_grammar else params.min_tokens, stop_token_ids
        )
    outputs = request.output_token_ids if params.beam is None else []
    block_keys: list[list[BlockKey]] = []
    if keys is not None:
        root = keys.root(request.cache_salt)
        block_keys = [keys.extend(root, request.prompt_token_ids + output) for output in outputs or [[]]]
    return Request(
        request.request_id,
        request.prompt_token_ids,
        rules,
        now,
        num_samples=params.n if params.beam is None else params.beam.width,
        is_beam=params.beam is not None,
        priority=request.priority,
        tenant=request.tenant,
        output_token_ids=[list(output) for output in outputs],
        block_keys=block_keys,
        ended_samples=ended_samples,
    )


def beam_search_of(request: EngineRequest, eos_token_ids: tuple[int, ...], max_model_len: int) -> BeamSearch | None:
    params = request.params
    if params.beam is None:
        return None
    max_tokens = min(params.max_tokens, max_model_len - len(request.prompt_token_ids))
    ending = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
    return BeamSearch(params.beam, ending | frozenset(params.stop_token_ids), max_tokens)
