"""What the scheduler is asked to run, and whether it ever can."""

from dataclasses import dataclass, field

from kv_cache import BlockKey, BlockManager
from scheduler.config import QueuePolicy, SchedulerConfig
from scheduler.sequence import OrderKey, Sequence, SequenceGroup, StopRules


class RequestTooLargeError(ValueError):
    """The request can never run here; the message has both numbers."""


@dataclass(slots=True)
class Request:
    """`num_samples` answers to one prompt. `priority`: lower is more urgent. `arrival_s` is on the caller's clock.

    `output_token_ids` (one list a sample) is what a resumed request has produced elsewhere. `block_keys` (one list
    a sample, or one for the prompt alone) names the full blocks of the known tokens; without keys nothing is cached.
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


def check_fits(request: Request, config: SchedulerConfig, blocks: BlockManager) -> None:
    """Raise RequestTooLargeError unless an idle engine could run the request."""
    num_tokens = len(request.prompt_token_ids) + max(map(len, request.output_token_ids), default=0)
    longest = config.max_model_len - min(request.stop_rules.max_tokens, 1)
    if num_tokens > longest:
        raise RequestTooLargeError(
            f"the prompt has {num_tokens} tokens; at most {longest} "
            f"leave room for an answer in the context of {config.max_model_len}"
        )
    if request.num_samples > config.max_num_seqs:
        raise RequestTooLargeError(
            f"{request.num_samples} sequences were asked for; at most {config.max_num_seqs} run at a time"
        )
    if not blocks.can_ever_fit(num_tokens, request.num_samples):
        num_blocks = blocks.num_blocks_for(num_tokens) + blocks.num_copies_for(num_tokens, request.num_samples)
        raise RequestTooLargeError(
            f"the prompt of {num_tokens} tokens needs {num_blocks} cache blocks for {request.num_samples} "
            f"sequence{'s' if request.num_samples > 1 else ''}; there are {blocks.num_usable_device_blocks}"
        )


def make_group(request: Request, config: SchedulerConfig, first_seq_id: int, arrival: int) -> SequenceGroup:
    """The group of a request that arrived as number `arrival`."""
    assert request.prompt_token_ids
    outputs = request.output_token_ids or [[] for _ in range(request.num_samples)]
    assert len(outputs) == request.num_samples
    sequences = [
        Sequence(first_seq_id + index, index, request.prompt_token_ids + output, len(request.prompt_token_ids))
        for index, output in enumerate(outputs)
    ]
    for seq, keys in zip(sequences, request.block_keys, strict=False):
        seq.block_keys = keys
    is_forked = request.num_samples == 1 or any(outputs)
    return SequenceGroup(
        request.request_id,
        sequences,
        request.stop_rules,
        _order(request, config, arrival),
        request.arrival_s,
        request.priority if config.queue_policy is QueuePolicy.PRIORITY else 0,
        request.tenant,
        request.is_beam,
        live=list(sequences) if is_forked else sequences[:1],
        is_forked=is_forked,
    )


def _order(request: Request, config: SchedulerConfig, arrival: int) -> OrderKey:
    """Under `priority` a static key with the aging built in: it never has to be sorted again."""
    if config.queue_policy is QueuePolicy.PRIORITY:
        return (request.arrival_s + request.priority * config.priority_aging_s, arrival)
    return (0.0, arrival)
