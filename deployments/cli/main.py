"""The command `stallfree`: picks the sub-command and turns what ends it into one line and an exit code.

Knows nothing of what the sub-commands do. Parsing and --help load neither torch nor ray.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from deployments.cli.options import (
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    PROGRAM,
    OneLineParser,
    UsageError,
    error_line,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 (it failed), 2 (it cannot be done as asked) or 130 (interrupted)."""
    try:
        args = _parser().parse_args(argv)
    except SystemExit as ending:  # argparse has said what there is to say
        return ending.code if isinstance(ending.code, int) else EXIT_USAGE
    try:
        exit_code = _run(args)
        sys.stdout.flush()
    except UsageError as error:
        sys.stderr.write(error_line(str(error)))
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has seen enough. Python's own flush at exit must not complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return exit_code


def _parser() -> OneLineParser:
    from deployments.cli import bench, explain, generate, replay, serve, simulate

    parser = OneLineParser(
        prog=PROGRAM,
        description="Serves large language models so that a long prompt never stalls the answers already streaming.",
        allow_abbrev=False,
    )
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    serve.add_parser(subparsers)
    generate.add_parser(subparsers)
    bench.add_parser(subparsers)
    simulate.add_parser(subparsers)
    replay.add_parser(subparsers)
    explain.add_parser(subparsers)
    return parser


def _run(args: argparse.Namespace) -> int:
    from deployments.cli import bench, explain, generate, replay, serve, simulate

    commands: dict[str, Callable[[argparse.Namespace], int]] = {
        "serve": serve.run,
        "generate": generate.run,
        "bench": bench.run,
        "simulate": simulate.run,
        "replay": replay.run,
        "explain": explain.run,
    }
    return commands[args.command](args)


if __name__ == "__main__":
    sys.exit(main())
