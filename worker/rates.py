"""Measured rates that choices rest on: between recompute and swap, and, in the router, between workers."""

from collections.abc import Callable

from kv_cache.tensor_pool import TensorPool
from scheduler.records import StepRecord
from scheduler.step_estimate import MIN_STEPS_SEEN, StepLoad, StepTimeEstimate

NUM_BLOCKS_TO_MEASURE = 16
#: of a rate that cannot be measured: a pool without host blocks never swaps
UNMEASURED_BLOCKS_PER_S = 1000.0
#: the step by which workers are compared: what they happen to run must not count as their speed
REFERENCE_PREFILL_TOKENS = 256
REFERENCE_DECODES = 8


class PrefillRate:
    """Prompt tokens a second, learnt from steps that were mostly prefill."""

    def __init__(self) -> None:
        self.tokens_per_s = 1000.0
        self._num_steps = 0

    def learn(self, record: StepRecord) -> bool:
        """Whether the step said something about it."""
        if not record.duration_s or record.num_prefill_tokens <= record.num_decodes:
            return False
        rate = record.num_batched_tokens / record.duration_s
        self._num_steps = min(self._num_steps + 1, 16)
        self.tokens_per_s += (rate - self.tokens_per_s) / self._num_steps
        return True


class StepSpeed:
    """What a step of `REFERENCE_PREFILL_TOKENS` and `REFERENCE_DECODES` would take, learnt from all kinds of steps."""

    def __init__(self) -> None:
        self._estimate = StepTimeEstimate()

    def learn(self, record: StepRecord) -> None:
        if record.duration_s:
            self._estimate.learn(StepLoad(record.num_decodes, 0, 0), record.num_prefill_tokens, record.duration_s)

    @property
    def reference_step_s(self) -> float:
        """0.0 until enough steps were seen."""
        if self._estimate.num_steps < MIN_STEPS_SEEN:
            return 0.0
        return self._estimate.predict_s(StepLoad(REFERENCE_DECODES, 0, 0), REFERENCE_PREFILL_TOKENS)


def measure_swap_rate(pool: TensorPool, clock: Callable[[], float]) -> float:
    """Blocks a second of one batched copy between device and host, over blocks that nobody holds yet."""
    count = min(NUM_BLOCKS_TO_MEASURE, pool.num_host_blocks, pool.num_device_blocks - 1)
    if count < 1:
        return UNMEASURED_BLOCKS_PER_S
    pairs = [(block + 1, block) for block in range(count)]
    pool.swap(pairs, [], [])
    began_s = clock()
    pool.swap(pairs, [], [])
    pool.swap([], [(host, device) for device, host in pairs], [])
    return 2 * count / max(clock() - began_s, 1e-9)
