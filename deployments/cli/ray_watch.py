"""A watch over the processes that a local Ray cluster stands on, and the end of all the others when one of them ends.

A call into Ray cannot be interrupted: one that waits for a cluster that is gone takes a minute, and then ends this
process by Ray's own abort. Knows nothing of what is served.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping

import psutil

from deployments.cli.options import EXIT_FAILED

#: A cluster of one node ends with each of these. The raylet does with its agent, but like the GCS server, which serves
#: nobody any more by then, it takes ten seconds to end by SIGTERM: the agent is gone at once.
_PROCESS_NAMES = ("gcs_server", "raylet", "ray::DashboardAgent")
#: what Ray's processes, and all that they start, carry in their environment
_RAYLET_PID_VARIABLE = "RAY_RAYLET_PID"
_LOOK_INTERVAL_S = 0.5
_KILLED_TIMEOUT_S = 0.5
#: Two seconds are usual.
_ORDERLY_END_TIMEOUT_S = 15.0


class RayWatch:
    """Calls `on_ended` with the name of the first of `processes` that has ended; at most once, in a thread of its own,
    and never after `end` has returned."""

    def __init__(self, processes: Mapping[str, psutil.Process], on_ended: Callable[[str], None]) -> None:
        self._processes = dict(processes)
        self._on_ended = on_ended
        self._is_over = threading.Event()
        # As a daemon: an exception that ends the main thread must not wait for it.
        self._thread = threading.Thread(target=self._look_on, name="ray-watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """After a last look."""
        self._is_over.set()
        self._thread.join()

    def _look_on(self) -> None:
        is_over = False
        while not is_over:
            is_over = self._is_over.wait(_LOOK_INTERVAL_S)
            for name, process in self._processes.items():
                if _has_ended(process):
                    self._on_ended(name)
                    return


def end_with_ray(say_that_it_ended: Callable[[str], None]) -> RayWatch:
    """From now on the end of the cluster that this process has started is its own: it says why, kills what is left,
    and exits with status 1."""
    processes = _local_ray_processes()
    raylet = processes["raylet"]
    return RayWatch(processes, lambda name: _end(f"{name} is gone", say_that_it_ended, raylet))


@contextlib.contextmanager
def ending_ray(say_that_it_ended: Callable[[str], None]) -> Iterator[None]:
    """The cluster is ended inside; should it be gone already, so that this would not return, that is seen to as well:
    a start that is cut short has no watch yet."""
    raylet = _local_ray_processes().get("raylet")
    why = f"it did not do so in order within {_ORDERLY_END_TIMEOUT_S:g} s"
    timer = threading.Timer(_ORDERLY_END_TIMEOUT_S, _end, (why, say_that_it_ended, raylet))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _end(why: str, say_that_it_ended: Callable[[str], None], raylet: psutil.Process | None) -> None:
    try:
        say_that_it_ended(why)
        # The raylet among the first, as it starts workers anew; they are nobody's children once it has ended.
        _kill(psutil.Process().children(recursive=True))
        if raylet is not None:
            _kill(_started_by(raylet))
    finally:
        os._exit(EXIT_FAILED)


def _local_ray_processes() -> dict[str, psutil.Process]:
    found = {}
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if (name := child.name()) in _PROCESS_NAMES:
                found[name] = child
    return found


def _started_by(raylet: psutil.Process) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["environ"])
        # None of processes that belong to others.
        if (process.info["environ"] or {}).get(_RAYLET_PID_VARIABLE) == str(raylet.pid)
    ]


def _kill(processes: Iterable[psutil.Process]) -> None:
    killed = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
            killed.append(process)
    psutil.wait_procs(killed, timeout=_KILLED_TIMEOUT_S)


def _has_ended(process: psutil.Process) -> bool:
    """Whether or not anybody has asked for its exit status."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
