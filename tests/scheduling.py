"""A scheduler in one line, and steps without a model: every row that samples gets a canned token."""

from typing import Any

from kv_cache import NULL_BLOCK, BlockKey, BlockManager
from scheduler import (
    PreemptionMode,
    QueuePolicy,
    Request,
    Scheduler,
    SchedulerConfig,
    SchedulerOutputs,
    SchedulerPolicy,
    SequenceEnd,
    SequenceGroup,
    StopRules,
)
from scheduler.queues import GroupQueue, WaitingQueue
from scheduler.records import StepRecord

#: what the first sample gets unless the test says otherwise; its siblings get the tokens after it
ORDINARY_TOKEN = 5
STOP_TOKEN = 2
STEP_S = 0.01


def block_keys(token_ids: list[int], block_size: int, salt: str = "") -> list[BlockKey]:
    """Names of the full blocks: all that comes before a block is part of its name, as is the salt."""
    return [
        repr((salt, token_ids[:end])).encode() for end in range(block_size, len(token_ids) + 1, block_size)
    ]


class Stepper:
    """`scheduler` over `blocks` of its own. Steps run one at a time unless a test calls `plan` and `settle` itself."""

    def __init__(
        self,
        *,
        policy: str = "chunked_prefill",
        mode: str = "recompute",
        order: str = "fcfs",
        budget: int = 64,
        max_num_seqs: int = 8,
        max_model_len: int = 64,
        block_size: int = 4,
        num_blocks: int = 1000,
        num_host_blocks: int = 0,
        watermark: float = 0.0,
        has_prefix_cache: bool = False,
        **options: Any,
    ) -> None:
        """`num_blocks` counts usable device blocks, `options` are further fields of `SchedulerConfig`."""
        config = SchedulerConfig(
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            policy=SchedulerPolicy(policy),
            preemption_mode=PreemptionMode(mode),
            queue_policy=QueuePolicy(order),
            **options,
        )
        self.blocks = BlockManager(block_size, num_blocks + NULL_BLOCK + 1, num_host_blocks, watermark=watermark)
        self.scheduler = Scheduler(config, self.blocks)
        self.groups: dict[str, SequenceGroup] = {}
        #: the last end of each request, and the end of each of its samples
        self.ends: dict[str, SequenceEnd] = {}
        self.sample_ends: dict[tuple[str, int], SequenceEnd] = {}
        #: the next samples of a request, one a row, before it goes on with ordinary tokens
        self.samples: dict[str, list[int]] = {}
        self._has_prefix_cache = has_prefix_cache
        self._salts: dict[str, str] = {}
        self._num_scheduled = 0

    @property
    def now(self) -> float:
        return self._num_scheduled * STEP_S

    def add(
        self,
        request_id: str,
        prompt: int | list[int],
        max_tokens: int = 1000,
        *,
        n: int = 1,
        is_beam: bool = False,
        priority: int = 0,
        tenant: str = "",
        salt: str = "",
        outputs: list[list[int]] | None = None,
        **rules: Any,
    ) -> SequenceGroup:
        """`prompt`: its tokens, or how many (then all prompts begin alike). `rules` are fields of `StopRules`."""
        token_ids = list(range(100, 100 + prompt)) if isinstance(prompt, int) else prompt
        limits = StopRules(
            max_tokens, self.scheduler.config.max_model_len, stop_token_ids=frozenset({STOP_TOKEN}), **rules
        )
        self._salts[request_id] = salt
        keys: list[list[BlockKey]] = []
        if self._has_prefix_cache:
            keys = [block_keys(token_ids + output, self.blocks.block_size, salt) for output in outputs or [[]]]
        request = Request(
            request_id,
            token_ids,
            limits,
            self.now,
            num_samples=n,
            is_beam=is_beam,
            priority=priority,
            tenant=tenant,
            output_token_ids=outputs or [],
            block_keys=keys,
        )
        group = self.scheduler.add(request)
        self.groups[request_id] = group
        return group

    def plan(self) -> SchedulerOutputs:
        """`schedule`, with the block accounting checked."""
        self._num_scheduled += 1
        outputs = self.scheduler.schedule(self.now)
        self.blocks.check_integrity()
        self._note(outputs.ended)
        return outputs

    def settle(self, outputs: SchedulerOutputs) -> None:
        samples: dict[int, list[int]] = {}
        keys: dict[int, list[BlockKey]] = {}
        for chunk in outputs.chunks:
            if not chunk.do_sample:
                continue
            group = self.groups[chunk.request_id]
            row = next(seq for seq in group.sequences if seq.seq_id == chunk.seq_id)
            for seq in [row] if chunk.sample_indices is None else [group.sequences[i] for i in chunk.sample_indices]:
                canned = self.samples.get(chunk.request_id)
                samples[seq.seq_id] = [canned.pop(0) if canned else ORDINARY_TOKEN + seq.index]
                token_ids = row.token_ids + samples[seq.seq_id]
                if self._has_prefix_cache and len(token_ids) % self.blocks.block_size == 0:
                    keys[seq.seq_id] = block_keys(
                        token_ids, self.blocks.block_size, self._salts[chunk.request_id]
                    )[-1:]
        self._note(self.scheduler.update(outputs.step_id, samples, self.now, block_keys=keys))
        self.blocks.check_integrity()

    def step(self) -> StepRecord:
        outputs = self.plan()
        record = self.scheduler.records.newest
        if not outputs.is_empty:
            self.settle(outputs)
        return record

    def steps(self, count: int) -> list[StepRecord]:
        return [self.step() for _ in range(count)]

    def run_to_end(self, *, max_steps: int = 2000) -> list[StepRecord]:
        """Step until nothing is left; nothing may be held then."""
        records: list[StepRecord] = []
        while self.scheduler.has_unfinished():
            assert len(records) < max_steps, f"not done after {max_steps} steps"
            records.append(self.step())
        assert self.blocks.num_used_device_blocks == 0
        assert self.blocks.num_used_host_blocks == 0
        assert self.scheduler.num_queued_tokens() == 0
        return records

    def abort(self, request_id: str) -> None:
        self._note(self.scheduler.abort(request_id))

    def finish(self, request_id: str, index: int = 0) -> None:
        self._note(self.scheduler.finish(request_id, index))

    def num_output_tokens(self, request_id: str, index: int = 0) -> int:
        return self.groups[request_id].sequences[index].num_output_tokens

    def num_held_blocks(self, request_id: str) -> int:
        return self.blocks.num_held_blocks([seq.seq_id for seq in self.groups[request_id].sequences])

    @property
    def waiting(self) -> list[str]:
        return _ids(self.scheduler.queues.waiting)

    @property
    def running(self) -> list[str]:
        return _ids(self.scheduler.queues.running)

    @property
    def swapped(self) -> list[str]:
        return _ids(self.scheduler.queues.swapped)

    def _note(self, ends: list[SequenceEnd]) -> None:
        for end in ends:
            sample = (end.request_id, end.index)
            assert sample not in self.sample_ends, f"{sample} ended twice"
            self.sample_ends[sample] = self.ends[end.request_id] = end


def _ids(queue: GroupQueue | WaitingQueue) -> list[str]:
    return [group.request_id for group in queue]


def chunk_sizes(record: StepRecord) -> dict[str, int]:
    """Prefill tokens of each request in the step."""
    sizes: dict[str, int] = {}
    for chunk in record.prefill_chunks:
        sizes[chunk.request_id] = sizes.get(chunk.request_id, 0) + chunk.end - chunk.start
    return sizes


def victims(record: StepRecord) -> list[tuple[str, str]]:
    """(request, mode) in the order in which they were preempted."""
    return [(preemption.victim, preemption.mode) for preemption in record.preemptions]
