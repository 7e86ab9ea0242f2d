"""How long a step takes: a linear model over what the step does, with named coefficients. Fitting is `step_fit.py`'s.

t = a + b·prefill tokens + c·decode rows + d·context read + e·Σ(chunk × context) + f·copied tokens
"""

from dataclasses import asdict, dataclass
from typing import Protocol

from scheduler.outputs import SchedulerOutputs

#: what a step does, in the order of the model's coefficients
StepWork = tuple[float, float, float, float, float, float]


def step_work(outputs: SchedulerOutputs, block_size: int) -> StepWork:
    """(1, prefill tokens, decode rows, context read, Σ(chunk × context) of prefills, copied tokens).

    The context of a row is every token that it reads, those of its own chunk included. Each block that is swapped
    or copied counts with all its tokens.
    """
    num_decodes = context = product = 0
    for chunk in outputs.chunks:
        size = len(chunk.token_ids)
        end = chunk.start + size
        context += end
        if chunk.is_prefill:
            product += size * end
        else:
            num_decodes += 1
    num_blocks = len(outputs.blocks_to_swap_out) + len(outputs.blocks_to_swap_in) + len(outputs.blocks_to_copy)
    return (1.0, outputs.num_prefill_tokens, num_decodes, context, product, num_blocks * block_size)


class StepTimer(Protocol):
    """What moves the simulator's clock: a model, or one with noise on it. Seconds."""

    @property
    def between_steps_s(self) -> float: ...

    def step_s(self, work: StepWork) -> float: ...


@dataclass(frozen=True, slots=True)
class StepModel:
    """Seconds: `base_s` for each step (a), then for each token, row or pair of the terms b to f.

    `between_steps_s` passes between a step's end and the next one's beginning while there is work.
    """

    base_s: float
    prefill_token_s: float
    decode_row_s: float
    context_token_s: float
    chunk_context_s: float
    copied_token_s: float
    between_steps_s: float = 0.0

    def step_s(self, work: StepWork) -> float:
        return (
            self.base_s
            + self.prefill_token_s * work[1]
            + self.decode_row_s * work[2]
            + self.context_token_s * work[3]
            + self.chunk_context_s * work[4]
            + self.copied_token_s * work[5]
        )

    def rates(self, max_num_batched_tokens: int, block_size: int) -> tuple[float, float]:
        """(prefill tokens a second, swapped blocks a second), as an engine would measure them."""
        prefill_s = self.base_s + self.prefill_token_s * max_num_batched_tokens
        return max_num_batched_tokens / prefill_s, 1.0 / max(self.copied_token_s * block_size, 1e-9)

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


#: Models for those who have no recording, with where their numbers come from.
PRESETS: dict[str, StepModel] = {
    # Estimated, not measured: 8 billion parameters in bf16 on one data-centre GPU of 3 TB/s. Reading the weights
    # takes 6 ms; 16 GFLOP a token at 400 TFLOP/s; 128 KiB of cache a token, read at 2.5 TB/s and copied at 25 GB/s.
    "gpu-8b": StepModel(8e-3, 4e-5, 3e-5, 5e-8, 1.7e-9, 5e-6, 5e-4),
    # Measured, but for the copies, which are a guess: fitted to a recorded run of the demo model (bf16, one thread)
    # on a machine with other work. A quiet machine is faster.
    "cpu-demo": StepModel(8.3e-2, 2.2e-3, 2.3e-2, 6.7e-7, 5.7e-6, 1e-6, 1e-4),
}
