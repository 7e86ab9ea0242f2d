"""What is asked of the block manager for a group that is to come in, and whether it can be had."""

from dataclasses import dataclass, field
from enum import Enum

from kv_cache.block_pool import BlockKey


class AllocStatus(Enum):
    """Whether a group can have its blocks: OK now, LATER when others release some, NEVER in this pool."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


@dataclass(slots=True)
class TableRequest:
    """A table wanted for the `num_tokens` known tokens of one sequence.

    `block_keys` names its full blocks as far as they may be found in the prefix cache. Its first
    `num_shared_blocks` blocks are those of the table requested at place `shared_with` of the same call.
    """

    seq_id: int
    num_tokens: int
    block_keys: list[BlockKey] = field(default_factory=list)
    shared_with: int = 0
    num_shared_blocks: int = 0


@dataclass(slots=True)
class PrefixCounts:
    """Blocks looked up in the prefix cache, and found."""

    num_queried_blocks: int = 0
    num_hit_blocks: int = 0
