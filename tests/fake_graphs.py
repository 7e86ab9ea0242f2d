"""CUDA graphs as they can be had on a CPU: what was captured are PyTorch's operations with their tensors, and a replay
runs those again, over the same memory. No Python of the model or the backend runs then, and no number that the host
knew is looked at anew. What would make a CUDA capture fail, since the host waits for the device, fails here too.
"""

from typing import Any
from weakref import WeakSet

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from worker.decode_graphs import Work

#: tensors of numbers that only the host has yet, or that are told it
_WAITING_NAMES = ("aten::lift_fresh", "aten::_local_scalar_dense", "aten::is_nonzero")
_WAITING_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class HostWaits(RuntimeError):
    """Captured work asked the device for a number, or brought one from the host."""


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _waits(operation, args):
            raise HostWaits(f"operation not permitted while a stream is captured: {operation}")
        result = operation(*args, **kwargs)
        self.calls.append((operation, args, kwargs, result))
        return result


def _waits(operation: Any, args: tuple[Any, ...]) -> bool:
    if operation._schema.name in _WAITING_NAMES:
        return True
    if operation._schema.name == "aten::index":  # by a mask it is a list of unknown length; by numbers it is not
        return any(index is not None and index.dtype == torch.bool for index in args[1])
    return any(tag in operation.tags for tag in _WAITING_TAGS)


def captured(work: Work) -> Work:
    """What runs `work` again as a graph would."""
    operations = _Operations()
    with operations:
        work()

    def replay() -> None:
        for operation, args, kwargs, old in operations.calls:
            new = operation(*args, **kwargs)
            olds, news = ((value,) if isinstance(value, torch.Tensor) else value for value in (old, new))
            for was, now in zip(olds or (), news or (), strict=True):
                # Views and what was changed in place are the same memory already.
                if isinstance(was, torch.Tensor) and was.data_ptr() != now.data_ptr():
                    was.copy_(now)

    return replay


class _Graph:
    def __init__(self, recorder: "FakeRecorder", replay: Work, num_bytes: int) -> None:
        self._recorder = recorder
        self._replay = replay
        self.num_bytes = num_bytes

    def __call__(self) -> None:
        self._recorder.num_replays += 1
        self._replay()


class FakeRecorder:
    """In the place of `CudaGraphRecorder`. The n-th graph takes `sizes_bytes[n]`, all after the last as much as that;
    None: there is no such memory."""

    def __init__(self, *sizes_bytes: int | None) -> None:
        self.num_captures = 0
        self.num_replays = 0
        self._sizes_bytes = sizes_bytes or (1,)
        self._living: WeakSet[_Graph] = WeakSet()

    def capture(self, work: Work) -> Work:
        num_bytes = self._sizes_bytes[min(self.num_captures, len(self._sizes_bytes) - 1)]
        self.num_captures += 1
        work()
        if num_bytes is None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        graph = _Graph(self, captured(work), num_bytes)
        self._living.add(graph)
        return graph

    def used_bytes(self) -> int:
        return sum(graph.num_bytes for graph in self._living)
