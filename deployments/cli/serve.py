"""`stallfree serve`: from options to a running application, one line when it is ready, and an end without remains.

Owns the order of a start: everything that can be refused is refused before Ray starts. Knows nothing of requests.
"""

import argparse
import contextlib
import functools
import io
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

from deployments.cli.options import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    OneLineParser,
    UsageError,
    add_engine_options,
    error_line,
    usage_error,
)
from deployments.cli.ports import can_listen, claim
from deployments.cli.serve_file import read_options
from deployments.cli.serve_options import DEFAULT_HOST, DEFAULT_PORT, add_serve_options
from deployments.engine_seam import threads_per_worker
from worker.config import ConfigError, EngineConfig

if TYPE_CHECKING:
    from deployments.cli.local_ray import RunningApp

NUM_SECRET_BYTES = 32
#: GNU timeout signals a process and then its group: the second of these is no second wish. When this has passed, it is
#: also seen whether Ray has got it.
_SAME_SIGNAL_S = 0.2
_WILDCARD_HOSTS = ("0.0.0.0", "::")

_DESCRIPTION = """\
Serves a model with an OpenAI-compatible HTTP API. Prints one line with the base URL when it is ready; progress goes
to standard error. Ctrl-C or SIGTERM lets running answers end, then stops everything that was started; a second one
stops at once."""


def add_parser(subparsers: "argparse._SubParsersAction[OneLineParser]") -> OneLineParser:
    parser = subparsers.add_parser(
        "serve",
        help="serve a model over HTTP",
        description=_DESCRIPTION,
        allow_abbrev=False,
        # An option that is not given leaves no trace, so that a file can fill it in.
        argument_default=argparse.SUPPRESS,
    )
    add_serve_options(parser)
    add_engine_options(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Serves until told to stop. 0: it was stopped; 1: it could not be started; `UsageError`: not as given."""
    given = {name: value for name, value in vars(args).items() if name != "command"}
    config_file = given.pop("config", None)
    options = {**(read_options(Path(config_file)) if config_file is not None else {}), **given}
    address = options.pop("address", None)
    host, port = _host_and_port(options)
    out, err = sys.stdout, sys.stderr
    with _stop_signals(), contextlib.redirect_stdout(err):
        # Ray prints errors of its processes to standard output, which is kept for the one line.
        try:
            with contextlib.ExitStack() as claims:
                return _serve(options, address, host, port, out, err, claims)
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED


def _serve(
    options: dict[str, Any],
    address: str | None,
    host: str,
    port: int,
    out: TextIO,
    err: TextIO,
    claims: contextlib.ExitStack,
) -> int:
    """`claims` keeps the ports that this server listens at."""
    from deployments.config import app_args_from

    is_local = address is None
    if is_local and "model" in options:
        options["model"] = _absolute_if_folder(str(options["model"]))
    if "chat_template" in options:
        options["chat_template"] = _read_template(str(options["chat_template"]))
    try:
        args = app_args_from(options)
        if is_local:
            claims.enter_context(_check_address("host", "port", host, port))
            claims.enter_context(
                _check_address("metrics_host", "metrics_port", args.metrics_host, args.metrics_port)
            )
            _say(err, f"checking {args.model}")
            for note in _check_model(args.to_engine_config()):
                _say(err, note)
            if args.num_threads is None:
                args = args.model_copy(update={"num_threads": threads_per_worker(args.worker_bounds[1])})
        if not args.shared_prefix_cache_secret:
            # Drawn here, once: all workers must name equal blocks alike.
            args = args.model_copy(update={"prefix_cache_secret": secrets.token_hex(NUM_SECRET_BYTES)})
    except ConfigError as error:
        raise usage_error(error) from error

    from deployments.app import build
    from deployments.cli.local_ray import RunningApp, StartError

    running = RunningApp(address)
    try:
        _say(err, "starting Ray" if is_local else f"connecting to Ray at {address}")
        running.start_ray(functools.partial(_say_that_ray_ended, out, err))
        # Ray has put its own handlers in place of ours; they end the process without undoing anything.
        _take_stop_signals()
        _say(err, f"starting {args.num_first_workers} x {args.model_name}")
        running.deploy(build(args), host, port)
        shown_host = DEFAULT_HOST if host in _WILDCARD_HOSTS else host
        out.write(f"Serving {args.model_name} at http://{shown_host}:{port}/v1\n")
        out.flush()
        _wait_for_stop()
        _say(err, f"stopping; running answers have {args.drain_timeout_s:g} s to end, a second signal cuts that short")
    except StartError as error:
        err.write(error_line(str(error)))
        return EXIT_FAILED
    finally:
        _stop(running, args.drain_timeout_s)
    return 0


def _stop(running: "RunningApp", drain_timeout_s: float) -> None:
    """A stop signal during the drain cuts it short; one after that changes nothing."""
    time.sleep(_SAME_SIGNAL_S)
    _take_stop_signals()
    # Ray reports its own processes' ends as errors: they are what was asked for.
    with contextlib.redirect_stdout(io.StringIO()):
        with contextlib.suppress(KeyboardInterrupt):
            running.stop_app(drain_timeout_s)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        running.stop_ray()


def _wait_for_stop() -> None:
    _take_stop_signals()
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            signal.pause()


def _take_stop_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)


@contextlib.contextmanager
def _stop_signals() -> Iterator[None]:
    """SIGTERM ends what is going on as Ctrl-C does."""
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(signal_number: int, frame: FrameType | None) -> None:
    """`_stop` listens again."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _pass_over)
    raise KeyboardInterrupt


def _pass_over(signal_number: int, frame: FrameType | None) -> None:
    pass


def _host_and_port(options: dict[str, Any]) -> tuple[str, int]:
    host, port = options.pop("host", DEFAULT_HOST), options.pop("port", DEFAULT_PORT)
    if not isinstance(host, str) or not host:
        raise UsageError("--host", f"must be a name or an address, got {host!r}")
    if not isinstance(port, int) or isinstance(port, bool) or not 1 <= port <= 65535:
        raise UsageError("--port", f"must be a number from 1 to 65535, got {port!r}")
    return host, port


def _check_address(
    host_option: str, port_option: str, host: str, port: int
) -> contextlib.AbstractContextManager[object]:
    """Keeps the port for this process while the context lasts. Raises `ConfigError` where nobody can listen there.

    Port 0 is none.
    """
    if port == 0:
        return contextlib.nullcontext()
    try:
        is_free = can_listen(host, port)
    except OSError as error:
        raise ConfigError(host_option, f"cannot listen on {host}: {error}") from error
    claimed = claim(port) if is_free else None
    if claimed is None:
        raise ConfigError(port_option, f"{port} on {host} is taken by another process")
    return claimed


def _absolute_if_folder(model: str) -> str:
    """Workers have another working folder."""
    folder = Path(model).expanduser()
    return str(folder.resolve()) if folder.is_dir() else model


def _read_template(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("--chat-template", f"cannot read {path}: {error}") from error


def _check_model(config: EngineConfig) -> tuple[str, ...]:
    """Fetches the model and refuses what cannot run, before anything is started. Raises `ConfigError`; returns notes
    for the operator."""
    from worker.demo_model import DemoModelError
    from worker.loading import check_loadable
    from worker.model_support import UnsupportedModelError
    from worker.weights import WeightsError

    try:
        return check_loadable(config)
    except (WeightsError, UnsupportedModelError, DemoModelError) as error:
        raise ConfigError("model", str(error)) from error


def _say_that_ray_ended(out: TextIO, err: TextIO, why: str) -> None:
    """The last words of this process: nobody flushes after them, and whoever read the line may be gone as well."""
    text = (
        f"Ray has ended, and the server with it: {why}. A signal to the whole process group does that: "
        f"signal the main process alone, {os.getpid()}"
    )
    with contextlib.suppress(OSError):
        err.write(error_line(text))
        err.flush()
        out.flush()


def _say(err: TextIO, text: str) -> None:
    err.write(f"{text}\n")
    err.flush()
