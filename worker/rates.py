"""Measured rates that choices rest on: between recompute and swap, and, in the router, between workers."""

from collections.abc import Callable
from dataclasses import dataclass

from kv_cache.tensor_pool import TensorPool
from scheduler.records import StepRecord
from scheduler.step_estimate import MIN_STEPS_SEEN, StepLoad, StepTimeEstimate

#: a CUDA device moves as many bytes as a long answer has, or what it takes to begin would count for too much
NUM_BLOCKS_TO_MEASURE = 16
NUM_BYTES_TO_MEASURE = {"cpu": 0, "cuda": 256 * 2**20}
NUM_MEASURED = 5
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


@dataclass(frozen=True, slots=True)
class SwapRates:
    """Blocks a second from the device to the host and back, each way by itself; 0.0: not measured."""

    out_blocks_per_s: float
    in_blocks_per_s: float

    @property
    def blocks_per_s(self) -> float:
        """On the way there and back: what a swap of a block takes is twice the inverse of it."""
        if not self.out_blocks_per_s or not self.in_blocks_per_s:
            return UNMEASURED_BLOCKS_PER_S
        return 2 / (1 / self.out_blocks_per_s + 1 / self.in_blocks_per_s)

    def note(self, block_bytes: int) -> str:
        """A sentence for the operator."""
        out_gb_per_s, in_gb_per_s = (
            rate * block_bytes / 1e9 for rate in (self.out_blocks_per_s, self.in_blocks_per_s)
        )
        return f"swapped blocks move to the host at {out_gb_per_s:.1f} GB/s and back at {in_gb_per_s:.1f} GB/s"


def measure_swap_rates(pool: TensorPool, clock: Callable[[], float]) -> SwapRates:
    """Of a batched copy each way, the fastest of some, over blocks that nobody holds yet."""
    wanted = max(NUM_BLOCKS_TO_MEASURE, NUM_BYTES_TO_MEASURE[pool.device.type] // pool.num_block_bytes)
    count = min(wanted, pool.num_host_blocks, pool.num_device_blocks - 1)
    if count < 1:
        return SwapRates(0.0, 0.0)
    out_pairs = [(block + 1, block) for block in range(count)]
    in_pairs = [(host, device) for device, host in out_pairs]
    # The shortest: the first one finds memory cold and kernels unloaded, and others of the machine get in between.
    times_s = [
        (pool.time_swap_s(out_pairs, [], clock), pool.time_swap_s([], in_pairs, clock)) for _ in range(NUM_MEASURED)
    ]
    out_s, in_s = (max(min(way_s), 1e-9) for way_s in zip(*times_s, strict=True))
    return SwapRates(count / out_s, count / in_s)
