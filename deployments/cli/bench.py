"""`stallfree bench`: from options to targets and a session, and from its results to text, JSON and plots."""

import argparse
import asyncio
import contextlib
import functools
import json
import math
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from deployments.bench.comparison import compare
from deployments.bench.progress import bar
from deployments.bench.prompts import FALLBACK_VOCAB_SIZE, PromptMaker
from deployments.bench.report import capacity_text, comparison_table, detail, slo_text, sweep_table
from deployments.bench.requests import Answer
from deployments.bench.results import Results
from deployments.bench.session import Session, SessionSettings
from deployments.bench.slo import Slo
from deployments.bench.target import Target, TargetError
from deployments.cli import bench_options
from deployments.cli.bench_checks import check_options
from deployments.cli.bench_options import (
    DEFAULT_MAX_SEARCH_S,
    DEFAULT_NUM_ROUNDS,
    DEFAULT_PRECISION,
    DEFAULT_TRIAL_S,
    Load,
)
from deployments.cli.bench_values import NamedUrl
from deployments.cli.options import EXIT_FAILED, UsageError, engine_config_from, error_line
from deployments.cli.progress import ProgressLine

#: a search over a workload without a rate of its own begins here
CAPACITY_START_RATE = 1.0

add_parser = bench_options.add_parser


def run(args: argparse.Namespace) -> int:
    """0: measured, whatever came out; 1: a target cannot be used, or answered nothing; `UsageError`: not as given."""
    check_options(args)
    load = bench_options.load_from(args)
    targets = _targets(args, load)
    try:
        with ProgressLine(sys.stderr) as line:
            results = asyncio.run(_measure(args, load, targets, line))
    except TargetError as error:
        sys.stderr.write(error_line(str(error)))
        return EXIT_FAILED
    _write(args, results)
    unanswered = results.unanswered()
    for summary in unanswered:
        reason = next(iter(summary.errors))
        sys.stderr.write(error_line(f"{summary.target}: no answer was complete: {reason}"))
    return EXIT_FAILED if unanswered else 0


async def _measure(args: argparse.Namespace, load: Load, targets: Sequence[Target], line: ProgressLine) -> Results:
    def progress(label: str, answers: Sequence[Answer]) -> None:
        line.show(lambda elapsed_s: bar(label, answers, elapsed_s))

    async with _opened(targets):
        session = Session(_settings(args, load, Slo()), progress)
        if args.compare and not args.text_prompts:
            _agree_on_prompts(targets)
        for target in targets:
            await session.warm_up(target, equal=bool(args.compare) and not args.capacity)
        solo_gap_s = await session.solo_gap_s(targets[0]) if bench_options.needs_solo_gap(args) else None
        slo = bench_options.slo_from(args, solo_gap_s)
        session.settings = _settings(args, load, slo)
        notes = [] if args.in_process else _notes(targets)
        results = Results(load.workload.describe(), slo, args.seed, solo_gap_s, notes=notes)
        if args.capacity:
            start_rate = _start_rate(load)
            for target in targets:
                found, measured = await session.capacity(target, start_rate)
                results.capacities[target.name] = found
                results.measured += measured
        elif args.compare:
            rounds = await session.compare(targets, load.rates[0], args.rounds or DEFAULT_NUM_ROUNDS)
            results.measured += [measured for of_target in rounds for measured in of_target]
            results.compared = compare([[measured.summary for measured in of_target] for of_target in rounds])
        else:
            results.measured += await session.sweep(targets[0], load.rates)
    return results


def _start_rate(load: Load) -> float:
    own_rate = load.workload.own_rate
    if load.rates[0] is not None:
        return load.rates[0]
    return CAPACITY_START_RATE if own_rate is None or math.isinf(own_rate) else own_rate


@contextlib.asynccontextmanager
async def _opened(targets: Sequence[Target]) -> AsyncIterator[None]:
    async with contextlib.AsyncExitStack() as stack:
        for target in targets:
            stack.push_async_callback(target.close)
            try:
                await target.open()
            except TargetError as error:
                raise TargetError(f"{target.name}: {error}") from error
        yield


def _settings(args: argparse.Namespace, load: Load, slo: Slo) -> SessionSettings:
    return SessionSettings(
        workload=load.workload,
        slo=slo,
        num_requests=load.num_requests,
        timeout_s=args.timeout_s,
        num_warm_up=args.warm_up,
        trial_s=args.trial_s or DEFAULT_TRIAL_S,
        precision=args.precision or DEFAULT_PRECISION,
        max_search_s=args.max_search_s or DEFAULT_MAX_SEARCH_S,
    )


def _targets(args: argparse.Namespace, load: Load) -> list[Target]:
    if args.in_process:
        from deployments.bench.engine_loading import load_engine_target

        def prompts_for(vocab_size: int) -> PromptMaker:
            if args.vocab_size is not None and args.vocab_size > vocab_size:
                raise UsageError("--vocab-size", f"the model has {vocab_size:,} token ids, got {args.vocab_size}")
            return PromptMaker(args.vocab_size or vocab_size, args.seed, load.prefix_block_tokens)

        return [load_engine_target(engine_config_from(args), prompts_for)]

    from deployments.bench.http_target import HttpTarget

    prompts = PromptMaker(args.vocab_size or FALLBACK_VOCAB_SIZE, args.seed, load.prefix_block_tokens)
    servers: list[NamedUrl] = args.compare or [NamedUrl(None, args.url)]
    targets = [
        HttpTarget(
            server.url,
            prompts,
            model=args.served_model_name,
            text=args.text_prompts,
            api_key=args.api_key,
            name=server.name,
            more_fields=bench_options.fields_for(args, server.name),
            timeout_s=args.timeout_s,
        )
        for server in servers
    ]
    for number, target in enumerate(targets, 1):
        is_named = servers[number - 1].name is not None
        if not is_named and sum(other.url == target.url for other in targets) > 1:  # to see the noise
            target.name = f"{target.name} #{number}"
    return list(targets)


def _agree_on_prompts(targets: Sequence[Target]) -> None:
    from deployments.bench.http_target import HttpTarget, agree_on_prompts

    servers = [target for target in targets if isinstance(target, HttpTarget)]
    if refusing := agree_on_prompts(servers):
        sys.stderr.write(f"all get words, as these take no token ids: {', '.join(refusing)}\n")


def _notes(targets: Sequence[Target]) -> list[str]:
    from deployments.bench.http_target import HttpTarget

    notes = []
    for target in targets:
        if isinstance(target, HttpTarget) and not target.dialect.token_ids:
            uncounted = "" if target.dialect.usage else "; it does not say how many tokens that is"
            notes.append(f"{target.name}: prompts are text, a common word for each token{uncounted}")
    return notes


def _write(args: argparse.Namespace, results: Results) -> None:
    if args.json == "-":
        print(json.dumps(results.to_dict()))
    else:
        print(_text(results))
        if args.json is not None:
            _to_file("--json", args.json, lambda path: path.write_text(json.dumps(results.to_dict()) + "\n"))
    if args.plot is not None:
        _plot(args.plot, results)


def _text(results: Results) -> str:
    summaries = [measured.summary for measured in results.measured]
    blocks = [f"{results.workload}"]
    if results.slo.is_set:
        blocks[0] += f"; {slo_text(results.slo)}"
    if results.solo_gap_s is not None:
        blocks[0] += f"; a lone request: {results.solo_gap_s * 1e3:.1f} ms between tokens"
    blocks[0] = "\n".join([blocks[0], *results.notes])
    if len(summaries) > 1:
        blocks.append(sweep_table(summaries))
    else:
        blocks.append(detail(summaries[0], results.slo))
    if results.compared:
        blocks.append("medians of the rounds (ratio to the first)\n" + comparison_table(results.compared))
    blocks += [capacity_text(target, found, results.slo) for target, found in results.capacities.items()]
    return "\n\n".join(blocks)


def _plot(prefix: str, results: Results) -> None:
    from deployments.bench.plots import inter_token_times, latency_against_rate, save

    summaries = [measured.summary for measured in results.measured]
    figures = {}
    if len({summary.offered_rate for summary in summaries}) > 1:
        figures[f"{prefix}-rate.png"] = latency_against_rate(summaries, results.slo)
    shown = results.shown_runs()
    for number, measured in enumerate(shown, 1):
        suffix = f"-{number}" if len(shown) > 1 else ""
        figures[f"{prefix}-itl{suffix}.png"] = inter_token_times(measured.run, measured.summary.stall_threshold_s)
    for name, figure in figures.items():
        _to_file("--plot", name, functools.partial(save, figure))


def _to_file(option: str, name: str, write: Callable[[Path], object]) -> None:
    try:
        write(Path(name))
    except OSError as error:
        raise UsageError(option, f"cannot write {name}: {error.strerror}") from error
    sys.stderr.write(f"wrote {name}\n")
