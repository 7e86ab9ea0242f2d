"""The settings under which the engine must give the same tokens, and what shows that each did its work.

Sizes are chosen from the prompts of a run: a pool is ample when all of them fit at once, tight when hardly more than
the longest one does.
"""

from dataclasses import dataclass, replace

from scheduler.records import StepRecord
from worker.config import EngineConfig, blocks_for
from worker.engine import EngineTotals


@dataclass(frozen=True, slots=True)
class Workload:
    """What the sizes depend on."""

    prompt_lengths: tuple[int, ...]
    max_tokens: int
    block_size: int
    max_model_len: int

    @property
    def ample_blocks(self) -> int:
        """All sequences at their full length, the null block, and the share that admissions leave free."""
        total = sum(blocks_for(length + self.max_tokens, self.block_size) for length in self.prompt_lengths)
        return total + total // 50 + 2

    @property
    def tight_blocks(self) -> int:
        """One sequence of the model's length and the null block. Three blocks at least: where a second sequence came
        in past the share that admissions leave free, both can still outgrow what they hold."""
        return max(blocks_for(self.max_model_len, self.block_size), 3) + 1


@dataclass(frozen=True, slots=True)
class Configuration:
    """`budget` None: the model's length, as `default` takes it. `preemption`: the mode that a tight pool must have
    forced; None: the pool is ample."""

    name: str
    budget: int | None = None
    alignment: int = 1
    policy: str = "chunked_prefill"
    preemption: str | None = None

    def engine_config(self, model: str, workload: Workload) -> EngineConfig:
        config = EngineConfig(
            model=model,
            dtype="float32",
            device="cpu",
            max_model_len=workload.max_model_len,
            max_num_batched_tokens=self.budget,
            block_size=workload.block_size,
            num_device_blocks=workload.ample_blocks,
            scheduler_policy=self.policy,
            chunk_alignment=self.alignment,
        )
        if self.preemption is None:
            return config
        return replace(
            config,
            num_device_blocks=workload.tight_blocks,
            # The host must hold all victims, or a swap falls back to recompute and shows nothing.
            num_host_blocks=workload.ample_blocks if self.preemption == "swap" else None,
            preemption_mode=self.preemption,
        )

    def check_it_did_its_work(
        self, workload: Workload, totals: EngineTotals, records: list[StepRecord]
    ) -> None:
        """An equality under a setting that never came into play would prove nothing."""
        num_preemptions = {"recompute": totals.num_preemptions_recompute, "swap": totals.num_preemptions_swap}
        for mode, number in num_preemptions.items():
            assert (number > 0) == (mode == self.preemption), f"{self.name}: {num_preemptions}"
        if self.preemption == "swap":
            assert totals.num_blocks_swapped_in == totals.num_blocks_swapped_out > 0
        num_prompts = len(workload.prompt_lengths)
        if self.policy == "default":
            assert not any(record.num_decodes and record.prefill_chunks for record in records)
            assert self.preemption or totals.num_prefill_chunks == num_prompts
        else:
            assert any(record.num_decodes and record.prefill_chunks for record in records)
            assert totals.num_prefill_chunks > num_prompts, f"{self.name}: no prompt was cut into chunks"
            assert max(record.num_batched_tokens for record in records) <= (self.budget or 0)


def six_configurations(*, wide: int, aligned: int, alignment: int, narrow: int) -> tuple[Configuration, ...]:
    """The six of the oracle, scaled: three budgets, the policy `default`, and two that run out of blocks."""
    return (
        Configuration(f"budget {wide}", wide),
        Configuration(f"budget {aligned} aligned to {alignment}", aligned, alignment),
        Configuration(f"budget {narrow} unaligned", narrow),
        Configuration("policy default", policy="default"),
        Configuration("recompute", aligned, preemption="recompute"),
        Configuration("swap", aligned, preemption="swap"),
    )
