"""Times of work that a device does after the call has returned: seconds, medians of several runs after some that are
thrown away (modules, kernels and workspaces are made by the first).
"""

import time
from collections.abc import Callable
from statistics import median

import torch

NUM_WARM_UPS = 3


def wait_for(device: str) -> None:
    """Until the device has done all that it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def wall_s(work: Callable[[], object], device: str, num_repeats: int) -> float:
    """From the call to the end of its work on the device, with whatever the host does in between: what a step takes."""
    _warm_up(work, device)
    return median(_wall_s(work, device) for _ in range(num_repeats))


def device_s(work: Callable[[], object], device: str, num_repeats: int) -> float:
    """What the device alone takes, between two events of its stream."""
    if device != "cuda":
        return wall_s(work, device, num_repeats)
    _warm_up(work, device)
    spans = []
    for _ in range(num_repeats):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        work()
        ended.record()
        spans.append((began, ended))
    torch.cuda.synchronize()
    return median(began.elapsed_time(ended) for began, ended in spans) / 1000


def _warm_up(work: Callable[[], object], device: str) -> None:
    for _ in range(NUM_WARM_UPS):
        work()
    wait_for(device)


def _wall_s(work: Callable[[], object], device: str) -> float:
    wait_for(device)
    began_s = time.perf_counter()
    work()
    wait_for(device)
    return time.perf_counter() - began_s
