"""All verbs of the block manager at random, over slots that remember what was written into them.

Each slot is to hold the tokens from the sequence's first one up to its own, which is also what block keys are made
of: a block that is wrongly shared, found, freed, copied or moved reads as somebody else's tokens.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kv_cache import NULL_BLOCK, BlockKey, BlockManager, BlockPairs, TableRequest

BLOCK_SIZE = 2
NUM_BLOCKS = 9
NUM_HOST_BLOCKS = 5

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9)
TAILS = st.lists(TOKENS, min_size=1, max_size=3)
Slots = dict[tuple[int, int], tuple[int, ...]]


def keys_of(token_ids: list[int]) -> list[BlockKey]:
    return [repr(token_ids[:end]).encode() for end in range(BLOCK_SIZE, len(token_ids) + 1, BLOCK_SIZE)]


def num_common_blocks(first: list[int], second: list[int]) -> int:
    """Full blocks that both begin with, the last token's block excepted."""
    longest = (min(len(first), len(second)) - 1) // BLOCK_SIZE * BLOCK_SIZE
    same = next((place for place in range(longest) if first[place] != second[place]), longest)
    return same // BLOCK_SIZE


class BlockManagerMachine(RuleBasedStateMachine):
    """Groups of sequences, all of whose tokens are computed; `tokens[seq_id]` is what they are."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(BLOCK_SIZE, NUM_BLOCKS + NULL_BLOCK + 1, NUM_HOST_BLOCKS, watermark=0.1)
        self.device: Slots = {}
        self.host: Slots = {}
        self.tokens: dict[int, list[int]] = {}
        self.resident: list[list[int]] = []
        self.swapped: list[list[int]] = []
        self.num_made = 0

    def _new_id(self) -> int:
        self.num_made += 1
        return self.num_made

    def _write(self, seq_id: int, first: int) -> None:
        table, tokens = self.blocks.block_table(seq_id), self.tokens[seq_id]
        for position in range(first, len(tokens)):
            self.device[table[position // BLOCK_SIZE], position % BLOCK_SIZE] = tuple(tokens[: position + 1])

    @staticmethod
    def _copy(pairs: BlockPairs, source: Slots, to: Slots) -> None:
        moved = {(d, i): source.get((s, i), ()) for s, d in pairs for i in range(BLOCK_SIZE)}
        to.update(moved)

    def _state(self) -> tuple[object, ...]:
        tables = {seq_id: list(self.blocks.block_table(seq_id)) for group in self.resident for seq_id in group}
        return tables, self.blocks.num_free_device_blocks, self.blocks.num_free_host_blocks

    @rule(base=TOKENS, tails=TAILS, has_keys=st.booleans(), num_kept=st.integers(0, 2))
    def allocate(self, base: list[int], tails: list[list[int]], has_keys: bool, num_kept: int) -> None:
        wanted = {self._new_id(): base + tail for tail in tails}
        requests: list[TableRequest] = []
        for seq_id, tokens in wanted.items():
            request = TableRequest(seq_id, len(tokens), keys_of(tokens) if has_keys else [])
            for place, earlier in enumerate(list(wanted.values())[: len(requests)]):
                if (count := num_common_blocks(tokens, earlier)) > request.num_shared_blocks:
                    request.shared_with, request.num_shared_blocks = place, count
            requests.append(request)
        before = self._state()
        num_needed = self.blocks.num_needed_blocks(requests) + num_kept
        is_refused = num_needed > self.blocks.num_admissible_device_blocks
        cached = self.blocks.allocate(requests, num_kept)
        assert (cached is None) == is_refused
        if cached is None:
            assert self._state() == before
            return
        assert before[1] - self.blocks.num_free_device_blocks == num_needed
        self.tokens |= wanted
        self.resident.append(list(wanted))
        for request, num_cached in zip(requests, cached, strict=True):
            assert num_cached < request.num_tokens
            self._write(request.seq_id, max(num_cached, request.num_shared_blocks * BLOCK_SIZE))

    @precondition(lambda self: self.resident)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.resident))
        parent, child = data.draw(st.sampled_from(group)), self._new_id()
        self.blocks.fork(parent, child)
        self.tokens[child] = list(self.tokens[parent])
        group.append(child)

    @precondition(lambda self: self.resident)
    @rule(data=st.data(), whole=st.booleans())
    def append(self, data: st.DataObject, whole: bool) -> None:
        group = data.draw(st.sampled_from(self.resident))
        writers = group if whole else [data.draw(st.sampled_from(group))]
        slots = [(seq_id, len(self.tokens[seq_id])) for seq_id in writers]
        before = self._state()
        copies = self.blocks.append_slots(*slots[0]) if len(slots) == 1 else self.blocks.append_group_slots(slots)
        if copies is None:
            assert self._state() == before
            return
        self._copy(copies, self.device, self.device)
        for seq_id, position in slots:
            self.tokens[seq_id].append(data.draw(st.integers(0, 1)))
            self._write(seq_id, position)

    @precondition(lambda self: self.resident)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from(data.draw(st.sampled_from(self.resident))))
        keys = keys_of(self.tokens[seq_id])
        first = data.draw(st.integers(0, len(keys)))
        self.blocks.publish(seq_id, first, keys[first:])

    @precondition(lambda self: self.resident)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        group, before = data.draw(st.sampled_from(self.resident)), self._state()
        pairs = self.blocks.swap_out({seq_id: len(self.tokens[seq_id]) for seq_id in group})
        if pairs is None:
            assert self._state() == before
            return
        assert len({source for source, _ in pairs}) == len(pairs)
        self._copy(pairs, self.device, self.host)
        self.resident.remove(group)
        self.swapped.append(group)

    @precondition(lambda self: self.swapped)
    @rule(data=st.data(), num_more=st.integers(0, 3), num_kept=st.integers(0, 1))
    def swap_in(self, data: st.DataObject, num_more: int, num_kept: int) -> None:
        group, before = data.draw(st.sampled_from(self.swapped)), self._state()
        num_tokens = {seq_id: len(self.tokens[seq_id]) + num_more for seq_id in group}
        num_wanted = self.blocks.num_swapped_blocks_wanted(num_tokens, num_kept)
        pairs = self.blocks.swap_in(num_tokens, num_kept)
        if pairs is None:
            assert self._state() == before
            return
        assert before[1] - self.blocks.num_free_device_blocks == num_wanted
        self._copy(pairs, self.host, self.device)
        self.swapped.remove(group)
        self.resident.append(group)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.tokens)))
        for groups in (self.resident, self.swapped):
            for group in [group for group in groups if seq_id in group]:
                group.remove(seq_id)
                if not group:
                    groups.remove(group)
        del self.tokens[seq_id]
        self.blocks.free(seq_id)
        self.blocks.free(seq_id)

    @invariant()
    def every_slot_reads_what_was_written(self) -> None:
        for group in self.resident:
            for seq_id in group:
                table, tokens = self.blocks.block_table(seq_id), self.tokens[seq_id]
                assert NULL_BLOCK not in table
                for position in range(len(tokens)):
                    slot = table[position // BLOCK_SIZE], position % BLOCK_SIZE
                    assert self.device[slot] == tuple(tokens[: position + 1])

    @invariant()
    def the_accounting_holds(self) -> None:
        self.blocks.check_integrity()

    def teardown(self) -> None:
        for seq_id in self.tokens:
            self.blocks.free(seq_id)
        self.blocks.check_integrity()
        assert self.blocks.num_free_device_blocks == NUM_BLOCKS
        assert self.blocks.num_free_host_blocks == NUM_HOST_BLOCKS


TestBlockManagerMachine = BlockManagerMachine.TestCase
TestBlockManagerMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
