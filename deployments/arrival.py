"""When a request came: at Serve's proxy, where that says so, else at the ingress.

The proxy writes down its moment in a header, on the clock that all processes of a machine share since its start; an
ingress of another machine does not read it. A client cannot set the header where the proxy does.
"""

import time
from functools import cache
from pathlib import Path

from starlette.requests import Request

HEADER = b"x-stallfree-received"
#: nothing waits for longer between two processes of one machine
MAX_AGE_S = 60.0
_BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")


@cache
def _boot_id() -> str:
    """Empty where the system has none: then the header says nothing to anybody."""
    return _BOOT_ID_FILE.read_text().strip() if _BOOT_ID_FILE.is_file() else ""


def received_now() -> bytes:
    """The header's value."""
    return f"{_boot_id()} {time.monotonic_ns()}".encode()


def arrival_of(request: Request) -> float:
    """Seconds of this process's `time.monotonic`."""
    now_s = time.monotonic()
    boot_id, _, moment = request.headers.get(HEADER.decode(), "").partition(" ")
    if not boot_id or boot_id != _boot_id() or not (moment.isascii() and moment.isdigit()) or len(moment) > 20:
        return now_s
    received_s = int(moment) / 1e9
    return received_s if now_s - MAX_AGE_S <= received_s <= now_s else now_s
