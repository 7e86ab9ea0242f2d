"""Servers that stand in for those of the comparison through HTTP: programs, their commands, ports for them."""

import contextlib
import os
import socket
import sys
from pathlib import Path

from benchmarks.servers.commands import HOST, ServerCommand

ROOT = Path(__file__).parent.parent
#: of `tests.fake_completions_server`, as a program: `PROGRAM PORT [stop_after]`
STAND_IN = """
import asyncio, sys
from tests.fake_completions_server import FakeServer, serving_at

server = FakeServer(gap_s=0.0, stop_after=int(sys.argv[2]) if len(sys.argv) > 2 else None)
print("a line of its log", flush=True)
asyncio.run(serving_at(server, int(sys.argv[1])))
"""
#: a smaller one, with a process of its own in another session: `PROGRAM PORT`
BARE_STAND_IN = """
import subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "bare"}]}')

    do_POST = do_GET

subprocess.Popen(["sleep", "600"], start_new_session=True)
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
#: ends at the request with this number; those that find out its dialect are counted, too: `PROGRAM PORT NUMBER`
MORTAL_STAND_IN = """
import asyncio, os, sys
from tests.fake_completions_server import FakeServer, serving_at

class Mortal(FakeServer):
    async def complete(self, request):
        if len(self.bodies) == int(sys.argv[2]):
            os._exit(3)
        return await super().complete(request)

asyncio.run(serving_at(Mortal(gap_s=0.0), int(sys.argv[1])))
"""


def stand_in(name: str, port: int, *arguments: str, program: str = STAND_IN) -> ServerCommand:
    command = [sys.executable, "-c", program, str(port), *arguments]
    return ServerCommand(name, command, {**os.environ, "PYTHONPATH": str(ROOT)}, "a stand-in")


def free_ports(count: int) -> int:
    """The first of so many in a row, below those that connections get."""
    for first in range(22_000, 32_000, count):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind((HOST, port))
            return first
    raise AssertionError("no free ports in a row")
