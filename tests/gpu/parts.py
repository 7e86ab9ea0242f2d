"""The parts of the check in their order, the cheap and important ones first, and what a part is made of.

Loads none of them: only the process that runs a part imports it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.gpu.report import Figure, Outcome
from tests.gpu.sizes import Sizes

MACHINE = "machine"
#: of a device's memory, beside weights and cache
STEP_BYTES = 6 * 2**30


@dataclass(frozen=True, slots=True)
class Case:
    """One row: `run` may raise, which fails this row alone. `name` says what is checked."""

    name: str
    run: Callable[[], Outcome]


@dataclass(frozen=True, slots=True)
class Part:
    """`module` has `cases(bench)`. `budget_s`: what takes longer is ended."""

    module: str
    budget_s: float


@dataclass(frozen=True, slots=True)
class Bench:
    """What a part is told. `facts`: the figures of the part `machine`, empty for that part itself."""

    sizes: Sizes
    facts: Mapping[str, Figure]

    @property
    def device(self) -> str:
        return self.sizes.device

    def has_memory_for(self, num_bytes: int) -> bool:
        """Beside what steps take for themselves. A CPU is asked for little enough."""
        return self.device == "cpu" or num_bytes + STEP_BYTES <= self.fact("memory_bytes")

    def fact(self, name: str) -> float:
        """A figure that `machine` measured; raises LookupError where it could not."""
        if name not in self.facts:
            raise LookupError(f"the part {MACHINE} did not measure {name}")
        return float(self.facts[name])


#: `machine` comes first: the others hold their figures against its
PARTS = {
    MACHINE: Part("tests.gpu.machine", 60),
    "attention": Part("tests.gpu.attention_rows", 120),
    "sampler": Part("tests.gpu.sampler_rows", 60),
    "engine": Part("tests.gpu.engine_rows", 100),
    "graphs": Part("tests.gpu.graph_rows", 60),
    "overlap": Part("tests.gpu.overlap_rows", 60),
    "swap": Part("tests.gpu.swap_rows", 40),
    "decode": Part("tests.gpu.decode_rows", 90),
    "long_prompt": Part("tests.gpu.long_prompt_rows", 90),
    "prefill": Part("tests.gpu.prefill_rows", 60),
    "start": Part("tests.gpu.start_rows", 90),
}
#: of the whole run, below the ten minutes that it is given
TOTAL_BUDGET_S = 560.0
