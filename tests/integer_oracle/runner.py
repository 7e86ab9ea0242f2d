"""A model made of integers: each cache slot stores a hash of (token, position), and the next token is a hash of all
slots that the block table reads. A wrong block, a stale one or a lost swap changes the tokens at once."""

from scheduler import PENDING_TOKEN_ID, SchedulerOutputs

VOCAB_SIZE = 40
STOP_TOKEN_ID = 0
_EMPTY = -1


def slot_value(token_id: int, position: int) -> int:
    return hash((token_id, position, 7))


def next_token(slots: tuple[int, ...]) -> int:
    return hash(slots) % VOCAB_SIZE


def solo_tokens(
    prompt: list[int], max_tokens: int, max_num_tokens: int, stop_token_ids: frozenset[int], num_pool_tokens: int
) -> tuple[list[int], str]:
    """The answer of an undisturbed request: it ends by stop token, by length, or when it outgrows the pool."""
    slots = [slot_value(token_id, position) for position, token_id in enumerate(prompt)]
    output: list[int] = []
    while True:
        token_id = next_token(tuple(slots))
        output.append(token_id)
        if token_id in stop_token_ids:
            return output, "stop"
        num_tokens = len(prompt) + len(output)
        if len(output) >= max_tokens or num_tokens >= max_num_tokens or num_tokens > num_pool_tokens:
            return output, "length"
        slots.append(slot_value(token_id, num_tokens - 1))


class IntegerRunner:
    """Executes steps over device and host slots, in the order in which they were planned."""

    def __init__(self, block_size: int, num_device_blocks: int, num_host_blocks: int) -> None:
        self._block_size = block_size
        self._device = [[_EMPTY] * block_size for _ in range(num_device_blocks)]
        self._host = [[_EMPTY] * block_size for _ in range(num_host_blocks)]
        self._last_sample: dict[int, int] = {}

    def execute(self, outputs: SchedulerOutputs) -> dict[int, list[int]]:
        """Samples by sequence id."""
        for source, destination in outputs.blocks_to_swap_out:
            self._host[destination] = list(self._device[source])
        for source, destination in outputs.blocks_to_swap_in:
            self._device[destination] = list(self._host[source])
        for source, destination in outputs.blocks_to_copy:
            self._device[destination] = list(self._device[source])
        size = self._block_size
        for chunk in outputs.chunks:
            for offset, token_id in enumerate(chunk.token_ids):
                if token_id == PENDING_TOKEN_ID:
                    token_id = self._last_sample[chunk.seq_id]
                position = chunk.start + offset
                block = chunk.block_table[position // size]
                assert block != 0, "the null block is written"
                self._device[block][position % size] = slot_value(token_id, position)
        samples: dict[int, list[int]] = {}
        for chunk in outputs.chunks:
            if chunk.do_sample:
                end = chunk.start + len(chunk.token_ids)
                slots = [slot for block in chunk.block_table for slot in self._device[block]]
                samples[chunk.seq_id] = [next_token(tuple(slots[:end]))]
                self._last_sample[chunk.seq_id] = samples[chunk.seq_id][0]
        return samples
