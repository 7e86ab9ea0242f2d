"""A Ray cluster of this machine for a test's own process.

Ray forks while gRPC's threads run; now and then the first call to the new cluster then stays without an answer until
Ray gives the start up. A second start, after what is left of the first one is ended, does not have that fault.
"""

import contextlib
import gc
import warnings
from typing import Any

import psutil
import ray

_GIVEN_UP = "timed out during startup"


def start_ray(**options: Any) -> Any:
    """What `ray.init` returns. Raises what it raises, if the start was given up for the second time too."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    try:
        return ray.init(address="local", **options)
    except Exception as error:
        if _GIVEN_UP not in str(error):
            raise
    ray.shutdown()
    for process in psutil.Process().children(recursive=True):
        if process.pid not in before:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    with warnings.catch_warnings():
        # Nobody waits for them any more.
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
    return ray.init(address="local", **options)
