"""One server by hand: `python -m benchmarks.servers NAME --environments FOLDER`.

Prints its URL when it is ready, and ends it after `--for-s`, or on Ctrl-C, SIGTERM or SIGHUP.
"""

import argparse
import contextlib
import os
import shlex
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

from benchmarks.options import (
    MOST_PORT,
    Parser,
    count,
    existing_folder,
    name_and_value,
    positive,
    run_program,
    whole_number,
)
from benchmarks.peers.drivers import PeerError, Setting
from benchmarks.servers.commands import METRICS_PORT_OFFSET, SERVERS
from benchmarks.servers.process import RunningServer, ServerError

DEFAULT_PORT = 8100
#: of the server; ours has a second port
LAST_PORT = MOST_PORT - METRICS_PORT_OFFSET
DEFAULT_FOR_S = 3600.0


def add_setting_options(parser: Parser) -> None:
    """What every start of a server needs to know."""
    add = parser.add_argument
    add("--environments", type=existing_folder, required=True, help="the folder that benchmarks/peers/setup.sh filled")
    add("--model", type=existing_folder, help="a folder with safetensors (default: the demo model)")
    add("--gguf", type=Path, help="the same model for llama.cpp (default: the demo model, Q4_1)")
    add("--num-threads", type=count, default=len(os.sched_getaffinity(0)), help="of every other server (default: all "
        "cores)")  # fmt: skip
    add("--option", action="append", type=name_and_value, default=[], metavar="NAME=VALUE", help="an option of our "
        "servers; repeat it")  # fmt: skip


def setting_of(args: argparse.Namespace) -> Setting:
    model: Path | None = args.model
    if model is None:
        from worker.demo_model import ensure_demo_model

        model = ensure_demo_model()
    return Setting(model, args.environments.resolve(), args.gguf, args.num_threads, tuple(args.option))


def main() -> int:
    parser = Parser("benchmarks.servers", __doc__)
    parser.add_argument("name", choices=tuple(SERVERS))
    add_setting_options(parser)
    parser.add_argument("--port", type=whole_number(1, LAST_PORT), default=DEFAULT_PORT, help="(default: %(default)s)")
    parser.add_argument("--for-s", type=positive, default=DEFAULT_FOR_S, metavar="S", help="(default: %(default)g)")
    args = parser.parse_args()
    interrupt_on_signals()
    with parser.refusing():
        setting = setting_of(args)
    try:
        command = SERVERS[args.name](setting, args.port)
        print(shlex.join(command.command), file=sys.stderr, flush=True)
        log = Path(tempfile.gettempdir()) / f"{command.name}-{args.port}.log"
        with contextlib.suppress(KeyboardInterrupt), RunningServer(command, args.port, log) as server:
            print(f"{server.url}/v1  ready after {server.start_s:.0f} s; log in {log}", flush=True)
            time.sleep(args.for_s)
    except (PeerError, ServerError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def interrupt_on_signals() -> None:
    """SIGTERM and the end of the terminal end this process as Ctrl-C does: with every server that it started."""

    def interrupt(signal_number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    # `nohup` has it ignored.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, interrupt)


if __name__ == "__main__":
    run_program(main)
