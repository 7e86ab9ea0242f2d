"""What `stallfree bench` refuses before anything is loaded or asked: contradictions, and what would have no effect."""

import argparse
import importlib.util
import math
from pathlib import Path

from deployments.bench.chats import LONG_EVERY_S
from deployments.cli.options import UsageError, given_engine_options, option_of
from deployments.cli.output_files import check_output

#: what is written with --plot begins with its prefix and these
PLOT_ENDINGS = ("-rate.png", "-itl.png")


def check_options(args: argparse.Namespace) -> None:
    """What can be refused before anything is loaded. Raises UsageError."""
    if not args.in_process:
        for name in given_engine_options(args):
            raise UsageError(option_of(name), "is an engine option: only with --in-process")
    if args.capacity and args.slo_ttft_ms is None and args.slo_itl_ms is None:
        raise UsageError("--capacity", "needs --slo-ttft-ms, --slo-itl-ms or both")
    if args.capacity and args.rate is not None and (len(args.rate) > 1 or math.isinf(args.rate[0])):
        raise UsageError("--rate", "with --capacity it is the one finite rate at which the search begins")
    if args.compare and not args.capacity and args.rate is not None and len(args.rate) > 1:
        raise UsageError("--rate", "--compare takes one rate")
    if args.scenario is not None and args.capacity:
        raise UsageError("--scenario", "has no rate, so no --capacity")
    if args.scenario is not None and args.duration_s is not None and args.duration_s < 2 * LONG_EVERY_S:
        raise UsageError("--duration-s", f"must be at least {2 * LONG_EVERY_S:g}")
    if args.scenario is None and args.duration_s is not None:
        raise UsageError("--duration-s", "only with --scenario")
    _check_bodies(args)
    _check_used(args)
    _check_outputs(args)
    if args.warm_up < 0:
        raise UsageError("--warm-up", f"must not be negative, got {args.warm_up}")


def _check_bodies(args: argparse.Namespace) -> None:
    if args.body and args.in_process:
        raise UsageError("--body", "is for servers")
    names = [named.name for named in args.compare or () if named.name is not None]
    if len(set(names)) < len(names):
        raise UsageError("--compare", "a name occurs twice")
    for more in args.body:
        if more.name is not None and more.name not in names:
            raise UsageError("--body", f"--compare has no server {more.name}")


def _check_used(args: argparse.Namespace) -> None:
    """Refuses what would change nothing."""
    if args.in_process:
        for name in ("served_model_name", "api_key", "text_prompts"):
            if getattr(args, name):
                raise UsageError(option_of(name), "is for servers")
    if args.text_prompts and args.vocab_size is not None:
        raise UsageError("--vocab-size", "of token ids, which --text-prompts does not send")
    if args.rounds is not None and (not args.compare or args.capacity):
        raise UsageError("--rounds", "only with --compare, and not with --capacity")
    for name in ("precision", "trial_s", "max_search_s"):
        if getattr(args, name) is not None and not args.capacity:
            raise UsageError(option_of(name), "only with --capacity")
    if args.stretch is not None and args.rate is not None:
        raise UsageError("--stretch", "a trace is stretched to its rate: give one of the two")


def _check_outputs(args: argparse.Namespace) -> None:
    if args.json is not None and args.json != "-":
        check_output("--json", Path(args.json))
    if args.plot is not None:
        for ending in PLOT_ENDINGS:
            check_output("--plot", Path(args.plot + ending))
        if importlib.util.find_spec("matplotlib") is None:
            raise UsageError("--plot", "needs matplotlib: pip install 'stallfree[plot]'")
