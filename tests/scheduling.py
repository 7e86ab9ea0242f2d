"""A scheduler in one line, and steps without a model: every row that samples gets a canned token."""

from typing import Any

from kv_cache import NULL_BLOCK, BlockManager
from scheduler import (
    PreemptionMode,
    Scheduler,
    SchedulerConfig,
    SchedulerOutputs,
    SchedulerPolicy,
    SequenceEnd,
    SequenceGroup,
    StopRules,
)
from scheduler.queues import GroupQueue
from scheduler.records import StepRecord

#: what every sampling row gets unless the test says otherwise
ORDINARY_TOKEN = 5
STOP_TOKEN = 2
STEP_S = 0.01


class Stepper:
    """`scheduler` over `blocks` of its own. Steps run one at a time unless a test calls `plan` and `settle` itself."""

    def __init__(
        self,
        *,
        policy: str = "chunked_prefill",
        mode: str = "recompute",
        budget: int = 64,
        max_num_seqs: int = 8,
        max_model_len: int = 64,
        block_size: int = 4,
        num_blocks: int = 1000,
        num_host_blocks: int = 0,
        watermark: float = 0.0,
        **options: Any,
    ) -> None:
        """`num_blocks` counts usable device blocks, `options` are further fields of `SchedulerConfig`."""
        config = SchedulerConfig(
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            policy=SchedulerPolicy(policy),
            preemption_mode=PreemptionMode(mode),
            **options,
        )
        self.blocks = BlockManager(block_size, num_blocks + NULL_BLOCK + 1, num_host_blocks, watermark=watermark)
        self.scheduler = Scheduler(config, self.blocks)
        self.groups: dict[str, SequenceGroup] = {}
        self.ends: dict[str, SequenceEnd] = {}
        #: the next samples of a request, one a step, before it goes on with ordinary tokens
        self.samples: dict[str, list[int]] = {}
        self._num_scheduled = 0

    def add(self, request_id: str, num_prompt_tokens: int, max_tokens: int = 1000, **rules: Any) -> SequenceGroup:
        prompt = list(range(100, 100 + num_prompt_tokens))
        stop_rules = StopRules(
            max_tokens, self.scheduler.config.max_model_len, stop_token_ids=frozenset({STOP_TOKEN}), **rules
        )
        group = self.scheduler.add(request_id, prompt, stop_rules, 0.0)
        self.groups[request_id] = group
        return group

    def plan(self) -> SchedulerOutputs:
        """`schedule`, with the block accounting checked."""
        self._num_scheduled += 1
        outputs = self.scheduler.schedule(self._num_scheduled * STEP_S)
        self.blocks.check_integrity()
        self._note(outputs.ended)
        return outputs

    def settle(self, outputs: SchedulerOutputs) -> None:
        samples: dict[int, list[int]] = {}
        for chunk in outputs.chunks:
            if chunk.do_sample:
                canned = self.samples.get(chunk.request_id)
                samples[chunk.seq_id] = [canned.pop(0) if canned else ORDINARY_TOKEN]
        self._note(self.scheduler.update(outputs.step_id, samples, self._num_scheduled * STEP_S))
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
        return records

    def abort(self, request_id: str) -> None:
        self._note(self.scheduler.abort(request_id))

    def finish(self, request_id: str) -> None:
        self._note(self.scheduler.finish(request_id, 0))

    def num_output_tokens(self, request_id: str) -> int:
        return self.groups[request_id].sequences[0].num_output_tokens

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
            assert end.request_id not in self.ends, f"{end.request_id} ended twice"
            self.ends[end.request_id] = end


def _ids(queue: GroupQueue) -> list[str]:
    return [group.request_id for group in queue]


def chunk_sizes(record: StepRecord) -> dict[str, int]:
    """Prefill tokens of each request in the step."""
    return {chunk.request_id: chunk.end - chunk.start for chunk in record.prefill_chunks}


def victims(record: StepRecord) -> list[tuple[str, str]]:
    """(request, mode) in the order in which they were preempted."""
    return [(preemption.victim, preemption.mode) for preemption in record.preemptions]
