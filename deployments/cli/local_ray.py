"""Ray and Serve as `stallfree serve` starts and stops them. Knows nothing of models or options.

Owns the promise that whatever was started here is gone afterwards, and that Ray's own chatter stays out of the
terminal.
"""

import socket
from pathlib import Path

import psutil

from deployments.config import prepare_ray_environment

#: Ray's shared-memory store: nothing of ours goes through it but start-up messages
OBJECT_STORE_BYTES = 100 * 2**20
_STOP_TIMEOUT_S = 10.0


class StartError(RuntimeError):
    """The application could not be started; the message is one line for the operator."""


def can_listen(host: str, port: int) -> bool:
    """Whether a server could take this address now."""
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(info[0], info[1]) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(info[4])
            probe.listen(1)
    except OSError:
        return False
    return True


def start_ray(address: str | None) -> None:
    """Connects to the cluster at `address`, or starts one on this machine that ends with this process."""
    prepare_ray_environment(Path(__file__).resolve().parents[2])
    import ray

    if address is not None:
        ray.init(address=address, log_to_driver=False, logging_level="error")
        return
    ray.init(
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        object_store_memory=OBJECT_STORE_BYTES,
    )


def stop_ray(*, is_local: bool) -> None:
    """Leaves the cluster; a local one ends, with every process that it started."""
    import ray

    started = psutil.Process().children(recursive=True) if is_local else []
    ray.shutdown()
    _, alive = psutil.wait_procs(started, timeout=_STOP_TIMEOUT_S)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=_STOP_TIMEOUT_S)
