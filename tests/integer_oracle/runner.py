"""A model made of integers: each cache slot stores a hash of (token, position), and the next token is a hash of all
slots that the block table reads. A wrong block, a stale one or a lost swap changes the tokens at once."""

from scheduler import PENDING_TOKEN_ID, SchedulerOutputs

VOCAB_SIZE = 40
STOP_TOKEN_ID = 0
_EMPTY = -1


def slot_value(token_id: int, position: int) -> int:
    return hash((token_id, position, 7))


def next_token(slots: tuple[int, ...], sample_index: int) -> int:
    return hash((slots, sample_index)) % VOCAB_SIZE


def beam_candidates(slots: tuple[int, ...]) -> list[tuple[int, int]]:
    """Three continuations of one beam: (score, token id)."""
    return [(hash((slots, place)) % 1000, hash((slots, place, 1)) % VOCAB_SIZE) for place in range(3)]


def slots_of(token_ids: list[int]) -> tuple[int, ...]:
    return tuple(slot_value(token_id, position) for position, token_id in enumerate(token_ids))


def solo_tokens(prompt: list[int], sample_index: int, num_tokens: int) -> list[int]:
    """The first `num_tokens` tokens of an answer that nothing disturbs."""
    slots = list(slots_of(prompt))
    output: list[int] = []
    while len(output) < num_tokens:
        output.append(next_token(tuple(slots), sample_index))
        slots.append(slot_value(output[-1], len(slots)))
    return output


def solo_beams(prompt: list[int], width: int, num_tokens: int) -> list[list[int]]:
    """The beams after `num_tokens` tokens, best first."""
    beams: list[tuple[int, list[int]]] = [(0, [])]
    for _ in range(num_tokens):
        choices = [
            (total + score, place, token_id)
            for place, (total, output) in enumerate(beams)
            for score, token_id in beam_candidates(slots_of(prompt + output))
        ]
        choices.sort(key=lambda choice: (-choice[0], choice[1], choice[2]))
        beams = [(total, [*beams[place][1], token_id]) for total, place, token_id in choices[:width]]
    return [output for _, output in beams]


class IntegerRunner:
    """Executes steps over device and host slots, in the order in which they were planned."""

    def __init__(self, block_size: int, num_device_blocks: int, num_host_blocks: int) -> None:
        self._block_size = block_size
        self._device = [[_EMPTY] * block_size for _ in range(num_device_blocks)]
        self._host = [[_EMPTY] * block_size for _ in range(num_host_blocks)]
        #: by sequence id, the last token sampled: what a pending token stands for
        self.last_samples: dict[int, int] = {}

    def execute(self, outputs: SchedulerOutputs) -> dict[int, tuple[int, ...]]:
        """By sequence id, what the block table of each sampling row reads."""
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
                    token_id = self.last_samples[chunk.seq_id]
                position = chunk.start + offset
                block = chunk.block_table[position // size]
                assert block != 0, "the null block is written"
                self._device[block][position % size] = slot_value(token_id, position)
        read: dict[int, tuple[int, ...]] = {}
        for chunk in outputs.chunks:
            if chunk.do_sample:
                end = chunk.start + len(chunk.token_ids)
                slots = [slot for block in chunk.block_table for slot in self._device[block]]
                read[chunk.seq_id] = tuple(slots[:end])
        return read
