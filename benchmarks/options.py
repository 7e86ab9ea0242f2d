"""The benchmarks' command lines: what values may be, and one line and exit status 2 for what they may not be.

Knows no benchmark. Loads no torch until something goes wrong.
"""

import argparse
import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from deployments.bench.traces import TraceError, read_trace

MOST_PORT = 2**16 - 1
_INTERRUPTED = 130


class BadValueError(Exception):
    """An option's value turned out to be of no use; the message begins with the option."""


def run_program(main: Callable[[], int | None]) -> NoReturn:
    """Exit with what `main` returns; with 130 when it was interrupted."""
    try:
        status = main()
    except KeyboardInterrupt:
        status = _INTERRUPTED
    sys.exit(status)


class Parser(argparse.ArgumentParser):
    """`module` is what stands after `python -m`; its docstring is its help."""

    def __init__(self, module: str, doc: str | None) -> None:
        super().__init__(
            prog=f"python -m {module}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
        )

    def error(self, message: str) -> NoReturn:
        line = " ".join(message.removeprefix("argument ").split())
        self.exit(2, f"{self.prog}: error: {line}\n")

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """What cannot be done with the values given, and shows only inside, ends the program as `error` does."""
        try:
            yield
        except (BadValueError, ValueError, RuntimeError) as error:
            message = _refusal(error)
            if message is None:
                raise
            self.error(message)


def _refusal(error: Exception) -> str | None:
    """What to say of it; None if it tells of no value but of a fault."""
    # Only here: what starts servers or other engines needs no torch itself.
    from scheduler.limits import LimitError
    from scheduler.requests import RequestTooLargeError
    from worker.config import ConfigError
    from worker.demo_model import DemoModelError
    from worker.model_support import UnsupportedModelError
    from worker.weights import WeightsError

    if isinstance(error, ConfigError | LimitError):
        return f"--{error.option.replace('_', '-')}: {str(error).removeprefix(f'{error.option}: ')}"
    if isinstance(error, DemoModelError | UnsupportedModelError | WeightsError | RequestTooLargeError):
        return f"--model: {error}"
    return str(error) if isinstance(error, BadValueError) else None


class NamesOnce(argparse.Action):
    """Of an option that takes several names."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        names = list(values or ())
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise argparse.ArgumentError(self, f"{twice} is named twice")
        setattr(namespace, self.dest, names)


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
        if value < least or (most is not None and value > most):
            bounds = f"at least {least}" if most is None else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"must be {bounds}, got {text!r}")
        return value

    return parse


count = whole_number(1)
port = whole_number(1, MOST_PORT)


def number_from(least: float) -> Callable[[str], float]:
    """A finite one."""

    def parse(text: str) -> float:
        value = _finite(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least:g}, got {text!r}")
        return value

    return parse


def positive(text: str) -> float:
    value = _finite(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def _finite(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}")
    return value


def existing_file(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    return path


def existing_folder(text: str) -> Path:
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {text}")
    return path


def trace_file(text: str) -> Path:
    """One that can be read. A default must be a text, so that it is looked at as well."""
    try:
        read_trace(Path(text))
    except (OSError, TraceError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise argparse.ArgumentTypeError(f"cannot read {text}: {reason}") from error
    return Path(text)


def name_and_value(text: str) -> str:
    name, equals, _ = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"must read NAME=VALUE, got {text!r}")
    return text
