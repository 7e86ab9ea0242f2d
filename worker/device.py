"""How the host hands work to a device and takes results back: numbers up, points in the device's order, results down.

What is launched runs in the order of its launches, on a CPU at once, on CUDA later. Nothing here waits for the device
but `wait`. Knows neither steps nor models.
"""

from collections.abc import Sequence
from typing import Protocol

import torch


class Event(Protocol):
    """A point in the order of what was launched."""

    def wait(self) -> None:
        """Until everything that was launched before this point has run."""
        ...


class HostCopy(Protocol):
    """A tensor on its way to the host."""

    def wait(self) -> torch.Tensor:
        """The tensor, on the CPU, once it has arrived."""
        ...


class Device(Protocol):
    #: whether work runs while the host goes on, so that it pays to plan ahead
    is_asynchronous: bool

    def upload(self, numbers: Sequence[float] | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The numbers [len(numbers)] on the device, for what is launched from now on."""
        ...

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same for a tensor of the CPU. Only what is launched before the caller changes it may read it."""
        ...

    def record(self) -> Event:
        """The point after everything launched so far."""
        ...

    def to_host(self, tensor: torch.Tensor) -> HostCopy:
        """Launch the copy of a tensor to the host."""
        ...


class CpuDevice:
    """Host and device are one: everything has run when its launch returns."""

    is_asynchronous = False

    def upload(self, numbers: Sequence[float] | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(numbers, dtype=dtype)

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def record(self) -> Event:
        return _Passed()

    def to_host(self, tensor: torch.Tensor) -> HostCopy:
        return _Here(tensor)


class CudaDevice:
    """The current stream of one CUDA device. Copies go through pinned memory, so that no launch waits for them."""

    is_asynchronous = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def upload(self, numbers: Sequence[float] | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        # PyTorch gives pinned memory to nobody else before the copies out of it have run.
        return torch.tensor(numbers, dtype=dtype, pin_memory=True).to(self._device, non_blocking=True)

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def record(self) -> Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return _CudaPoint(event)

    def to_host(self, tensor: torch.Tensor) -> HostCopy:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copy.copy_(tensor, non_blocking=True)
        return _Arriving(copy, self.record())


def open_device(device: torch.device | str) -> Device:
    device = torch.device(device)
    return CudaDevice(device) if device.type == "cuda" else CpuDevice()


class _Passed:
    def wait(self) -> None:
        return None


class _CudaPoint:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()


class _Here:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> torch.Tensor:
        return self._tensor


class _Arriving:
    def __init__(self, copy: torch.Tensor, arrived: Event) -> None:
        self._copy = copy
        self._arrived = arrived

    def wait(self) -> torch.Tensor:
        self._arrived.wait()
        return self._copy
