"""The options of `stallfree bench`: what they are called, and what they come to. Loads no engine and no HTTP client."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployments.bench.chats import DEFAULT_DURATION_S, ChatsWorkload
from deployments.bench.chats import DEFAULT_INPUT_LEN as CHAT_INPUT_LEN
from deployments.bench.chats import DEFAULT_OUTPUT_LEN as CHAT_OUTPUT_LEN
from deployments.bench.mixes import MOST_TOKENS, LengthRange, MixPart
from deployments.bench.slo import Slo
from deployments.bench.traces import MOONCAKE_BLOCK_TOKENS, TraceError, read_trace
from deployments.bench.workloads import SyntheticWorkload, TraceWorkload, Workload
from deployments.cli.bench_values import (
    ItlLimit,
    count,
    http_url,
    itl_limit,
    lengths,
    mix,
    more_fields,
    named_url,
    num_tokens,
    positive,
    positive_or_inf,
    rates_list,
    share,
)
from deployments.cli.options import (
    OneLineParser,
    UsageError,
    add_engine_options,
    option_of,
    whole_number,
)

DEFAULT_NUM_REQUESTS = 100
DEFAULT_INPUT_LEN = LengthRange(128, 128)
DEFAULT_OUTPUT_LEN = LengthRange(64, 64)
DEFAULT_NUM_ROUNDS = 3
DEFAULT_TRIAL_S = 20.0
DEFAULT_PRECISION = 0.05
DEFAULT_MAX_SEARCH_S = 600.0
SCENARIOS = ("chats",)

_DESCRIPTION = """\
Sends requests at moments that are fixed before the run (open loop) and measures every latency from the moment a
request should have left, so that neither a slow server nor a slow client can hide a delay. Drives a server with an
OpenAI-compatible API, several of them in turn, or an engine in this process. A table goes to standard output,
progress to standard error. Exit status 1: the target cannot be used, or no request was answered."""


@dataclass(frozen=True, slots=True)
class Load:
    """What to send, and at which rates (None: the trace's own)."""

    workload: Workload
    rates: list[float | None]
    num_requests: int | None
    prefix_block_tokens: int


def add_parser(subparsers: "argparse._SubParsersAction[OneLineParser]") -> OneLineParser:
    parser = subparsers.add_parser(
        "bench", help="measure a server or an engine under load", description=_DESCRIPTION, allow_abbrev=False
    )
    _add_target_options(parser)
    _add_load_options(parser)
    _add_measuring_options(parser)
    add_engine_options(parser)
    return parser


def _add_target_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to drive")
    one = group.add_mutually_exclusive_group(required=True)
    one.add_argument("--url", type=http_url, metavar="URL", help="base URL of a server, such as http://127.0.0.1:8000/v1")
    one.add_argument("--compare", nargs="+", type=named_url, metavar="[NAME=]URL", help="several servers in turn, "
                     "with the same requests")  # fmt: skip
    one.add_argument("--in-process", action="store_true", help="an engine in this process, with the engine options")
    add = group.add_argument
    add("--served-model-name", metavar="NAME", help="what the server calls the model (default: its first)")
    add("--api-key", metavar="KEY", help="sent as a bearer token")
    add("--text-prompts", action="store_true", help="send words, not token ids (default: if the server refuses ids)")
    add("--body", action="append", type=more_fields, default=[], metavar="[NAME=]JSON", help="fields to add to each "
        "request, or to those of the server NAME of --compare; may be repeated")  # fmt: skip
    add("--vocab-size", type=count, metavar="N", help="token ids of prompts are below it (default: the engine's, or "
        "5000 for a server)")  # fmt: skip


def _add_load_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    what = group.add_mutually_exclusive_group()
    what.add_argument("--mix", type=mix, metavar="MIX", help="name:share@input/output,... with lengths in tokens or "
                      "ranges of them: chat:0.9@64-256/64,long:0.1@4096/32")  # fmt: skip
    what.add_argument("--scenario", choices=SCENARIOS, help="chats: 8 chats stream all the time, and every 5 s a "
                      "prompt of 1,900 tokens comes in")  # fmt: skip
    what.add_argument("--trace", type=Path, metavar="FILE", help="CSV (arrival_s,input_tokens,output_tokens, "
                      "or an Azure trace) or Mooncake's JSON lines")  # fmt: skip
    add = group.add_argument
    add("--input-len", type=lengths, metavar="N", help="tokens of a prompt: a number or a range (default: 128; of "
        f"a chat's {CHAT_INPUT_LEN})")  # fmt: skip
    add("--output-len", type=lengths, metavar="N", help="tokens of an answer (default: 64; of a chat's "
        f"{CHAT_OUTPUT_LEN})")  # fmt: skip
    add("--rate", type=rates_list, metavar="R[,R...]", help="requests a second, one run for each; inf: all at once. "
        "A trace is stretched to it (default: the trace's own; else 1)")  # fmt: skip
    add("--num-requests", type=count, metavar="N", help=f"in each run (default: {DEFAULT_NUM_REQUESTS}, or all of "
        "the trace)")  # fmt: skip
    add("--burstiness", type=positive_or_inf, metavar="K", help="shape of the gamma distribution of arrivals: "
        "1 is Poisson, less is burstier, inf is even (default: 1)")  # fmt: skip
    add("--scale-input", type=positive, metavar="F", help="multiply the trace's prompt lengths")
    add("--fix-output", type=num_tokens, metavar="N", help="every answer of the trace has N tokens")
    add("--stretch", type=positive, metavar="F", help="multiply the times of the trace")
    add("--duration-s", type=positive, metavar="S", help="length of a run of --scenario (default: "
        f"{DEFAULT_DURATION_S:g})")  # fmt: skip
    add("--seed", type=whole_number, default=0, metavar="N", help="of arrivals, lengths and prompts (default: 0)")


def _add_measuring_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("measuring")
    add = group.add_argument
    add("--slo-ttft-ms", type=positive, metavar="MS", help="limit on the time to the first token")
    add("--slo-itl-ms", type=itl_limit, metavar="MS", help="limit on the 99th percentile of inter-token times; 5x: "
        "five times what a lone request sees")  # fmt: skip
    add("--capacity", action="store_true", help="find the highest rate that keeps the limits (median first token)")
    add("--max-search-s", type=positive, metavar="S", help="with --capacity: no trial begins later (default: "
        f"{DEFAULT_MAX_SEARCH_S:g})")  # fmt: skip
    add("--trial-s", type=positive, metavar="S", help="with --capacity: a trial has at least the requests of so many "
        f"seconds, if there are any more (default: {DEFAULT_TRIAL_S:g})")  # fmt: skip
    add("--precision", type=share, metavar="P", help="of the capacity, between 0 and 1 (default: "
        f"{DEFAULT_PRECISION:g}, {DEFAULT_PRECISION:.0%})".replace("%", "%%"))  # fmt: skip
    add("--rounds", type=count, metavar="N", help="with --compare: runs of each server (default: "
        f"{DEFAULT_NUM_ROUNDS})")  # fmt: skip
    add("--warm-up", type=whole_number, default=2, metavar="N", help="requests before, not counted (default: 2)")
    add("--timeout-s", type=positive, default=600.0, metavar="S", help="a request without end failed; holds for what "
        "is asked before the run, too, at most two minutes each (default: 600)")  # fmt: skip
    add("--json", metavar="FILE", help="write the results as one JSON object; -: to standard output, without tables")
    add("--plot", metavar="PREFIX", help="write PREFIX-*.png; needs matplotlib (pip install 'stallfree[plot]')")


def load_from(args: argparse.Namespace) -> Load:
    """Raises UsageError for options that contradict each other and for a trace that cannot be read."""
    rates: list[float | None]
    if args.scenario is not None:
        _refuse(args, "--scenario", "rate", "num_requests", "burstiness")
        _refuse_without_trace(args)
        chats = ChatsWorkload(
            args.duration_s or DEFAULT_DURATION_S,
            chat_input_tokens=args.input_len or CHAT_INPUT_LEN,
            chat_output_tokens=args.output_len or CHAT_OUTPUT_LEN,
            seed=args.seed,
        )
        return Load(chats, [None], None, MOONCAKE_BLOCK_TOKENS)
    if args.trace is not None:
        _refuse(args, "--trace", "input_len", "output_len", "burstiness")
        try:
            records = read_trace(args.trace)
        except (OSError, TraceError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UsageError("--trace", f"cannot read {args.trace}: {reason}") from error
        scale_input = args.scale_input or 1.0
        trace = TraceWorkload(args.trace.name, records, scale_input, args.fix_output, args.stretch or 1.0)
        if scale_input * max(record.num_input_tokens for record in records) > MOST_TOKENS:
            raise UsageError("--scale-input", f"makes a prompt of more than {MOST_TOKENS:,} tokens")
        rates = [None] if args.rate is None else list(args.rate)
        try:
            for rate in [1.0] if args.capacity else rates:
                trace.plan(args.num_requests, rate)
        except ValueError as error:
            raise UsageError("--trace", str(error)) from error
        return Load(trace, rates, args.num_requests, trace.prefix_block_tokens)
    _refuse_without_trace(args)
    if args.mix is not None:
        _refuse(args, "--mix", "input_len", "output_len")
        parts: list[MixPart] = args.mix
    else:
        parts = [MixPart("", 1.0, args.input_len or DEFAULT_INPUT_LEN, args.output_len or DEFAULT_OUTPUT_LEN)]
    synthetic = SyntheticWorkload(parts, args.seed, DEFAULT_NUM_REQUESTS, args.burstiness or 1.0)
    rates = [1.0] if args.rate is None else list(args.rate)
    return Load(synthetic, rates, args.num_requests, MOONCAKE_BLOCK_TOKENS)


def fields_for(args: argparse.Namespace, name: str | None) -> dict[str, Any]:
    """What `--body` adds to the requests of this server."""
    added: dict[str, Any] = {}
    for more in args.body:
        if more.name is None or more.name == name:
            added |= more.fields
    return added


def slo_from(args: argparse.Namespace, solo_gap_s: float | None) -> Slo:
    """`solo_gap_s` is needed where the limit is a multiple of it."""
    ttft_s = None if args.slo_ttft_ms is None else args.slo_ttft_ms / 1e3
    limit: ItlLimit | None = args.slo_itl_ms
    if limit is None:
        return Slo(ttft_s, None)
    if limit.factor is not None:
        assert solo_gap_s is not None
        return Slo(ttft_s, limit.factor * solo_gap_s)
    assert limit.value_ms is not None
    return Slo(ttft_s, limit.value_ms / 1e3)


def needs_solo_gap(args: argparse.Namespace) -> bool:
    return args.slo_itl_ms is not None and args.slo_itl_ms.factor is not None


def _refuse(args: argparse.Namespace, source: str, *names: str) -> None:
    for name in names:
        if getattr(args, name) is not None:
            raise UsageError(option_of(name), f"{source} says what is sent")


def _refuse_without_trace(args: argparse.Namespace) -> None:
    for name in ("scale_input", "fix_output", "stretch"):
        if getattr(args, name) is not None:
            raise UsageError(option_of(name), "only with --trace")
