"""Each attention backend against plain attention over random mixed batches: block sizes, windows, softcap, groups."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch

from tests.gpu.attention_batches import RandomBatch
from tests.gpu.backends import backend_class, backend_names
from tests.gpu.parts import Bench, Case
from tests.gpu.report import Outcome, Verdict, judged
from worker.attention import AttentionNotSupported
from worker.config import ConfigError

#: how far a number may be off, by dtype; values are at most 2
LIMITS = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
BLOCK_SIZES = (16, 256)
SOFTCAP = 30.0


@dataclass(frozen=True, slots=True)
class Variant:
    window: int | None
    softcap: float | None


VARIANTS = (Variant(None, None), Variant(50, None), Variant(None, SOFTCAP), Variant(50, SOFTCAP))


def cases(bench: Bench) -> list[Case]:
    return [
        Case(
            f"{name} {str(dtype).removeprefix('torch.')} block {block_size}",
            lambda name=name, dtype=dtype, block_size=block_size: compare(bench, name, dtype, block_size),
        )
        for name in backend_names(bench.device)
        for dtype in bench.sizes.attention_dtypes
        for block_size in BLOCK_SIZES
    ]


def compare(bench: Bench, name: str, dtype: torch.dtype, block_size: int) -> Outcome:
    """The greatest difference over every variant and number of heads. What a backend refuses is named."""
    greatest, num_batches, refusals = 0.0, 0, []
    try:
        for batch, variant in _batches(bench, dtype, block_size):
            backend = backend_class(name, bench.device, dtype, batch.pool.head_size, block_size)
            try:
                got = batch.run(backend, variant.window, variant.softcap)
            except AttentionNotSupported as error:
                refusals.append(str(error))
                continue
            difference = (got.double() - batch.wanted(variant.window, variant.softcap)).abs().max().item()
            # NaN is greater than nothing, and must not pass.
            greatest = max(greatest, difference) if difference == difference else torch.inf
            num_batches += 1
    except ConfigError as error:
        return Outcome(str(error), {"refused": str(error)}, Verdict.REFUSED)
    text = f"off by {greatest:.1e} at most (limit {LIMITS[dtype]:.0e}), {num_batches} batches"
    text += "".join(f"; refused: {reason}" for reason in sorted(set(refusals)))
    figures = {"max_difference": greatest, "num_batches": num_batches}
    return judged(num_batches > 0 and greatest <= LIMITS[dtype], text, figures)


def _batches(bench: Bench, dtype: torch.dtype, block_size: int) -> Iterator[tuple[RandomBatch, Variant]]:
    sizes = bench.sizes
    mixes = product(sizes.attention_head_sizes, sizes.attention_heads, VARIANTS)
    for seed, (head_size, heads, variant) in enumerate(mixes):
        batch = RandomBatch(
            seed,
            num_rows=sizes.attention_rows,
            max_context=sizes.attention_context,
            block_size=block_size,
            heads=heads,
            head_size=head_size,
            dtype=dtype,
            device=bench.device,
        )
        yield batch, variant
