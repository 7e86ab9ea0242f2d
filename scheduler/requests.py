"""What the scheduler is asked to run, and whether it ever can."""

from dataclasses import dataclass, field

from kv_cache import BlockKey, BlockManager
from scheduler.config import QueuePolicy, SchedulerConfig
from scheduler.sequence import OrderKey, Sequence, SequenceGroup, SequenceStatus, StopRules


class RequestTooLargeError(ValueError):
    """The request can never run here; the message has both numbers."""


@dataclass(slots=True)
class Request:
    """`num_samples` answers to one prompt. `priority`: lower is more urgent. `arrival_s` is on the caller's clock.

    `output_token_ids` (one list a sample) is what a resumed request has produced elsewhere, and `ended_samples` are
    those of its samples that have ended there: they get no cache, no slot and no token. `block_keys` (one list a
    sample, or one for the prompt alone) names the full blocks of the known tokens; without keys nothing is cached.
    """

    request_id: str
    prompt_token_ids: list[int]
    stop_rules: StopRules
    arrival_s: float
    num_samples: int = 1
    is_beam: bool = False
    priority: int = 0
    tenant: str = ""
    output_token_ids: list[list[int]] = field(default_factory=list)
    block_keys: list[list[BlockKey]] = field(default_factory=list)
    ended_samples: tuple[int, ...] = ()

    @property
    def num_open_samples(self) -> int:
        return self.num_samples - len(self.ended_samples)

    @property
    def num_known_tokens(self) -> int:
        """Of its longest open sample."""
        lengths = (len(o) for index, o in enumerate(self.output_token_ids) if index not in self.ended_samples)
        return len(self.prompt_token_ids) + max(lengths, default=0)


def check_fits(request: Request, config: SchedulerConfig, blocks: BlockManager) -> None:
    """Raise RequestTooLargeError unless an idle engine could run the request.

    A resumed one that has outgrown the pool is let in: it ends with "length", as it would have where it came from.
    """
    num_tokens = request.num_known_tokens
    num_samples = request.num_open_samples
    longest = config.max_model_len - min(request.stop_rules.max_tokens, 1)
    if num_tokens > longest:
        raise RequestTooLargeError(
            f"the prompt has {num_tokens} tokens; at most {longest} "
            f"leave room for an answer in the context of {config.max_model_len}"
        )
    if num_samples > config.max_num_seqs:
        raise RequestTooLargeError(
            f"{num_samples} sequences were asked for; at most {config.max_num_seqs} run at a time"
        )
    has_output = num_tokens > len(request.prompt_token_ids)
    if not has_output and not blocks.can_ever_fit(num_tokens, num_samples):
        num_blocks = blocks.num_blocks_for(num_tokens) + blocks.num_copies_for(num_tokens, num_samples)
        raise RequestTooLargeError(
            f"the prompt of {num_tokens} tokens needs {num_blocks} cache blocks for {num_samples} "
            f"sequence{'s' if num_samples > 1 else ''}; there are {blocks.num_usable_device_blocks}"
        )


def make_group(request: Request, config: SchedulerConfig, first_seq_id: int, arrival: int) -> SequenceGroup:
    """The group of a request that arrived as number `arrival`."""
    assert request.prompt_token_ids
    assert request.num_open_samples > 0, "nothing is left to run"
    outputs = request.output_token_ids or [[] for _ in range(request.num_samples)]
    assert len(outputs) == request.num_samples
    sequences = [
        Sequence(first_seq_id + index, index, request.prompt_token_ids + output, len(request.prompt_token_ids))
        for index, output in enumerate(outputs)
    ]
    for seq, keys in zip(sequences, request.block_keys, strict=False):
        seq.block_keys = keys
    for index in request.ended_samples:
        sequences[index].status = SequenceStatus.FINISHED_STOPPED
    live = [seq for seq in sequences if not seq.status.is_finished]
    is_forked = request.num_samples == 1 or any(outputs) or bool(request.ended_samples)
    return SequenceGroup(
        request.request_id,
        sequences,
        request.stop_rules,
        _order(request, config, arrival),
        request.arrival_s,
        request.priority if config.queue_policy is QueuePolicy.PRIORITY else 0,
        request.tenant,
        request.is_beam,
        live=live if is_forked else live[:1],
        is_forked=is_forked,
    )


def _order(request: Request, config: SchedulerConfig, arrival: int) -> OrderKey:
    """Under `priority` a static key with the aging built in: it never has to be sorted again."""
    if config.queue_policy is QueuePolicy.PRIORITY:
        return (request.arrival_s + request.priority * config.priority_aging_s, arrival)
    return (0.0, arrival)
