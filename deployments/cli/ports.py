"""Whether a server could listen at an address of this machine, and that no second one of ours thinks so too."""

import errno
import fcntl
import os
import socket
import tempfile
from pathlib import Path
from typing import TextIO


def can_listen(host: str, port: int) -> bool:
    """False where the port is taken or not ours to take. Raises OSError where `host` is no address of this machine."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True


def claim(port: int) -> TextIO | None:
    """Keep `port` for this process until the file is closed; None where another one keeps it.

    Ray's proxies share ports, and bind them seconds after they were found free: two servers that start together
    would both get one, and each half of the requests.
    """
    path = Path(tempfile.gettempdir()) / f"stallfree-{os.getuid()}-{port}.lock"
    file = path.open("w", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file
