"""What a group asks of the block manager when it is let in: tables that share what its sequences have in common."""

from kv_cache import BlockManager, TableRequest
from scheduler.queues import Queues
from scheduler.sequence import Sequence, SequenceGroup


def table_requests(group: SequenceGroup, blocks: BlockManager) -> tuple[list[TableRequest], int]:
    """One request for each live sequence, and the number of blocks to keep for the parting of its siblings.

    A sequence shares the full blocks that it has in common with an earlier one, its last token's block excepted:
    that one it writes itself.
    """
    requests: list[TableRequest] = []
    for place, seq in enumerate(group.live):
        request = TableRequest(seq.seq_id, seq.num_tokens, seq.block_keys)
        for earlier_place in range(place):
            num_common = _num_common_blocks(seq, group.live[earlier_place], blocks.block_size)
            if num_common > request.num_shared_blocks:
                request.shared_with, request.num_shared_blocks = earlier_place, num_common
        requests.append(request)
    return requests, _num_copies(group, blocks)


def swap_requests(group: SequenceGroup, blocks: BlockManager) -> tuple[dict[int, int], int]:
    """Known tokens by sequence, and the number of blocks to keep for the parting of its siblings."""
    return {seq.seq_id: seq.num_tokens for seq in group.live}, _num_copies(group, blocks)


def headroom(group: SequenceGroup, queues: Queues) -> int:
    """Blocks that must stay free beside the group when it comes back, so that running answers can grow.

    None after its first preemption; from then on a block more for each of their sequences every time, or a pool
    under pressure throws out and takes back the same group again and again.
    """
    if group.num_preemptions < 2:
        return 0
    return (group.num_preemptions - 1) * sum(other.num_seqs for other in queues.running)


def _num_copies(group: SequenceGroup, blocks: BlockManager) -> int:
    return 0 if group.is_forked else blocks.num_copies_for(group.live[0].num_tokens, len(group.sequences))


def _num_common_blocks(seq: Sequence, other: Sequence, block_size: int) -> int:
    longest = (min(seq.num_tokens, other.num_tokens) - 1) // block_size
    low, high = 0, longest
    while low < high:
        middle = (low + high + 1) // 2
        start, end = low * block_size, middle * block_size
        if seq.token_ids[start:end] == other.token_ids[start:end]:
            low = middle
        else:
            high = middle - 1
    return low
