"""Each attention backend against plain attention over random mixed batches: block sizes, windows, softcap, groups."""

from itertools import product

import torch

from tests.gpu.attention_batches import RandomBatch
from tests.gpu.backends import backend_class, backend_names
from tests.gpu.parts import Bench, Case
from tests.gpu.report import Outcome, Verdict, judged
from tests.gpu.sizes import AttentionMix
from worker.attention import AttentionNotSupported
from worker.config import ConfigError

#: how far a number may be off, by dtype; values are at most 2
LIMITS = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
BLOCK_SIZES = (16, 256)


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
    """The greatest difference over all mixes of heads, windows and softcaps, in mixed steps and in those of decodes
    alone. What a backend refuses is named."""
    greatest, num_batches, refusals = 0.0, 0, []
    try:
        for seed, (mix, only_decodes) in enumerate(product(bench.sizes.attention_mixes, (False, True))):
            backend = backend_class(name, bench.device, dtype, mix.head_size, block_size)
            batch = _batch(bench, seed, mix, dtype, block_size, only_decodes=only_decodes)
            try:
                got = batch.run(backend, mix.window, mix.softcap)
            except AttentionNotSupported as error:
                refusals.append(str(error))
                continue
            difference = (got.double() - batch.wanted(mix.window, mix.softcap)).abs().max().item()
            # NaN is greater than nothing, and must not pass.
            greatest = max(greatest, difference) if difference == difference else torch.inf
            num_batches += 1
    except ConfigError as error:
        return Outcome(str(error), {"refused": str(error)}, Verdict.REFUSED)
    text = f"off by {greatest:.1e} at most (limit {LIMITS[dtype]:.0e}), {num_batches} batches"
    text += "".join(f"; refused: {reason}" for reason in sorted(set(refusals)))
    figures = {"max_difference": greatest, "num_batches": num_batches}
    return judged(num_batches > 0 and greatest <= LIMITS[dtype], text, figures)


def _batch(
    bench: Bench, seed: int, mix: AttentionMix, dtype: torch.dtype, block_size: int, *, only_decodes: bool
) -> RandomBatch:
    return RandomBatch(
        seed,
        num_rows=bench.sizes.attention_rows,
        max_context=bench.sizes.attention_context,
        block_size=block_size,
        heads=mix.heads,
        head_size=mix.head_size,
        dtype=dtype,
        device=bench.device,
        only_decodes=only_decodes,
    )
