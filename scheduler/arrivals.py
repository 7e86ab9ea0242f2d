"""A request without its text: sizes, rules and block keys, which is all that the scheduler decides by.

Traces, recordings and the simulator speak of requests in this form. Knows neither files nor clocks.
"""

from dataclasses import dataclass, field, replace

from kv_cache import BlockKey
from scheduler.requests import Request
from scheduler.sequence import StopRules

#: stand-ins for token ids: what a prompt is made of, what ends an answer, and the first of the samples' own
PROMPT_TOKEN = 1
STOP_TOKEN = 0
_FIRST_OWN_TOKEN = 2


def own_token(index: int) -> int:
    """A token that no sibling of sample `index` ever gets by itself."""
    return _FIRST_OWN_TOKEN + index


@dataclass(frozen=True, slots=True)
class ResumedOutput:
    """What a resumed sample had produced elsewhere: so many tokens, the first `num_common` of them those that the
    earlier sample `like` has too."""

    num_tokens: int
    like: int = 0
    num_common: int = 0


@dataclass(slots=True)
class Arrival:
    """A request as it came in. `max_num_tokens` bounds prompt and output together."""

    request_id: str
    arrival_s: float
    num_prompt_tokens: int
    max_tokens: int
    max_num_tokens: int
    min_tokens: int = 0
    num_samples: int = 1
    is_beam: bool = False
    priority: int = 0
    tenant: str = ""
    outputs: list[ResumedOutput] = field(default_factory=list)
    block_keys: list[list[BlockKey]] = field(default_factory=list)
    ended_samples: tuple[int, ...] = ()

    @property
    def num_open_samples(self) -> int:
        return self.num_samples - len(self.ended_samples)

    def to_request(self) -> Request:
        """With stand-ins for tokens, which agree among the samples exactly where the real ones did."""
        outputs: list[list[int]] = []
        for index, output in enumerate(self.outputs):
            common = outputs[output.like][: output.num_common] if output.num_common else []
            outputs.append(common + [own_token(index)] * (output.num_tokens - output.num_common))
        return Request(
            self.request_id,
            [PROMPT_TOKEN] * self.num_prompt_tokens,
            StopRules(self.max_tokens, self.max_num_tokens, self.min_tokens, frozenset({STOP_TOKEN})),
            self.arrival_s,
            self.num_samples,
            self.is_beam,
            self.priority,
            self.tenant,
            outputs,
            [keys.copy() for keys in self.block_keys],
            self.ended_samples,
        )


def arrival_of(request: Request) -> Arrival:
    """The request without its text."""
    rules = request.stop_rules
    return Arrival(
        request.request_id,
        request.arrival_s,
        len(request.prompt_token_ids),
        rules.max_tokens,
        rules.max_num_tokens,
        rules.min_tokens,
        request.num_samples,
        request.is_beam,
        request.priority,
        request.tenant,
        [_resumed_output(request.output_token_ids, index) for index in range(len(request.output_token_ids))],
        request.block_keys,
        request.ended_samples,
    )


@dataclass(slots=True)
class Work:
    """An arrival and what is to become of it, however it is scheduled.

    `num_output_tokens` is by sample, what it arrived with included. `output_keys` (by sample) names the blocks that
    the output completes, `beam_parents` the places of the parents in each step of a beam search. `cancel_s` is when
    the client leaves.
    """

    arrival: Arrival
    num_output_tokens: list[int]
    output_keys: list[list[BlockKey]] = field(default_factory=list)
    beam_parents: list[list[int]] = field(default_factory=list)
    cancel_s: float | None = None

    @property
    def num_tokens(self) -> int:
        """Of all its sequences when they have ended, the prompt counted for each."""
        return self.arrival.num_prompt_tokens * self.arrival.num_samples + sum(self.num_output_tokens)

    def key_of_completed_block(self, num_tokens: int, index: int, block_size: int) -> BlockKey | None:
        """The name of the block that the last of `num_tokens` tokens of sample `index` fills, if it has one."""
        if num_tokens % block_size or not self.output_keys:
            return None
        arrival = self.arrival
        num_known = arrival.outputs[index].num_tokens if arrival.outputs else 0
        place = num_tokens // block_size - 1 - (arrival.num_prompt_tokens + num_known) // block_size
        keys = self.output_keys[index]
        return keys[place] if place < len(keys) else None

    def without_keys(self) -> "Work":
        """The same work where no prefix is ever found."""
        return replace(self, arrival=replace(self.arrival, block_keys=[]), output_keys=[])

    def under(
        self, *, block_size_factor: int, has_prefix_cache: bool, max_num_tokens: tuple[int, int]
    ) -> "Work":
        """The same work for blocks that are so many times as large, and where the first of two lengths was the
        limit, with the second one."""
        was, limit = max_num_tokens
        work = self
        if self.arrival.max_num_tokens == was:
            work = replace(work, arrival=replace(work.arrival, max_num_tokens=limit))
        if not has_prefix_cache or not self.arrival.block_keys:
            return work.without_keys()
        if block_size_factor == 1:
            return work
        prompts = self.arrival.block_keys
        merged_prompts = [keys[block_size_factor - 1 :: block_size_factor] for keys in prompts]
        output_keys: list[list[BlockKey]] = []
        for index, keys in enumerate(self.output_keys):
            place = index if index < len(prompts) else 0
            # A key stands for everything up to it, so the last of several blocks names them all.
            merged = (prompts[place] + keys)[block_size_factor - 1 :: block_size_factor]
            output_keys.append(merged[len(merged_prompts[place]) :])
        return replace(work, arrival=replace(work.arrival, block_keys=merged_prompts), output_keys=output_keys)


def _resumed_output(outputs: list[list[int]], index: int) -> ResumedOutput:
    own = outputs[index]
    commons = [num_common_tokens(own, other) for other in outputs[:index]]
    like = max(range(index), key=commons.__getitem__, default=0)
    return ResumedOutput(len(own), like, commons[like] if commons else 0)


def num_common_tokens(first: list[int], second: list[int]) -> int:
    """How long both begin alike."""
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count
