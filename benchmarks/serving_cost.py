"""Processor time that the processes of a server took, by what they are. Knows nothing of requests."""

import psutil

#: what a process calls itself, by what it is here
_KINDS = {"proxy": "ProxyActor", "ingress": "Ingress", "worker": "Worker", "haproxy": "haproxy"}


class ProcessTimes:
    """Sums up over all pairs of `begin` and `end`."""

    def __init__(self) -> None:
        self.cpu_s: dict[str, float] = {}
        self._before: dict[str, float] = {}

    def begin(self) -> None:
        self._before = _cpu_s_by_kind()

    def end(self) -> None:
        for kind, cpu_s in _cpu_s_by_kind().items():
            self.cpu_s[kind] = self.cpu_s.get(kind, 0.0) + cpu_s - self._before.get(kind, 0.0)


def _cpu_s_by_kind() -> dict[str, float]:
    """`client` is this process."""
    own = psutil.Process()
    found = {"client": _cpu_s(own)}
    for process in own.children(recursive=True):
        title = " ".join(process.cmdline()[:1])
        for kind, name in _KINDS.items():
            if name in title:
                found[kind] = found.get(kind, 0.0) + _cpu_s(process)
    return found


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system
