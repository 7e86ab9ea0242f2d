"""What runs the check, and the two ceilings that later rows are held against: bytes read and products made a second."""

import platform

import torch
import transformers

from tests.gpu.parts import Bench, Case
from tests.gpu.report import Outcome
from tests.gpu.timing import device_s

GIGA = 10**9


def cases(bench: Bench) -> list[Case]:
    found = [Case("device and versions", lambda: device_facts(bench))]
    if bench.device == "cuda" and not torch.cuda.is_available():
        return found  # it says why, and nothing else can run
    return [
        *found,
        Case("reading device memory", lambda: read_rate(bench)),
        Case(f"product of {bench.sizes.matmul_size} x {bench.sizes.matmul_size}", lambda: product_rate(bench)),
    ]


def device_facts(bench: Bench) -> Outcome:
    if bench.device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("PyTorch finds no CUDA device: --dry-run runs the check on the CPU")
    name = torch.cuda.get_device_name() if bench.device == "cuda" else platform.machine()
    memory_bytes = torch.cuda.mem_get_info()[1] if bench.device == "cuda" else 0
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "triton": _triton_version()}
    text = f"{name}, {memory_bytes / 2**30:.0f} GiB; " + ", ".join(f"{name} {text}" for name, text in versions.items())
    return Outcome(text, {"device_name": name, "memory_bytes": memory_bytes, **versions})


def read_rate(bench: Bench) -> Outcome:
    """The better of a sum (which only reads) and a copy (which reads and writes)."""
    numbers = torch.randn(bench.sizes.copy_bytes // 4, device=bench.device)
    target = torch.empty_like(numbers)
    sum_s = device_s(numbers.sum, bench.device, bench.sizes.num_repeats)
    copy_s = device_s(lambda: target.copy_(numbers), bench.device, bench.sizes.num_repeats)
    summed, copied = numbers.nbytes / sum_s, 2 * numbers.nbytes / copy_s
    text = f"{max(summed, copied) / GIGA:.0f} GB/s (sum {summed / GIGA:.0f}, copy {copied / GIGA:.0f})"
    return Outcome(text, {"read_bytes_per_s": max(summed, copied)})


def product_rate(bench: Bench) -> Outcome:
    size = bench.sizes.matmul_size
    # Zeros run faster than numbers do.
    left, right = (torch.randn(size, size, device=bench.device).to(bench.sizes.dtype) for _ in range(2))
    seconds = device_s(lambda: left @ right, bench.device, bench.sizes.num_repeats)
    rate = 2 * size**3 / seconds
    return Outcome(f"{rate / 10**12:.1f} TFLOP/s in {bench.sizes.dtype}", {"flops_per_s": rate})


def _triton_version() -> str:
    try:
        import triton
    except ImportError:
        return "not installed"
    return triton.__version__
