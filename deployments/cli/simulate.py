"""`stallfree simulate`: a trace through the real scheduler on a virtual clock, without a model.

Owns the command's options and its output. The simulation itself is `scheduler.simulator`.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from deployments.cli.options import (
    OneLineParser,
    UsageError,
    add_engine_options,
    whole_number,
)
from deployments.cli.run_table import run_table
from deployments.cli.virtual_engine import config_for_trace, fitted_model, pool_size
from kv_cache import BlockManager
from scheduler import Scheduler
from scheduler.listening import RunListener
from scheduler.recording import Recorder
from scheduler.run_report import RunReport
from scheduler.simulator import Simulator
from scheduler.step_model import PRESETS, StepModel
from scheduler.timeline import Timeline
from scheduler.traces import TracedRequest, TraceError, read_trace, works_of
from worker.config import ResolvedConfig

DEFAULT_STEP_MODEL = "gpu-8b"

_DESCRIPTION = """\
Runs a trace of arrivals through the scheduler and the block manager of this version, on a virtual clock that a
step-time model moves. No model is loaded and no time is waited for. Options of the engine mean what they mean for
`serve`; those that are about a model are not looked at."""


def add_parser(subparsers: "argparse._SubParsersAction[OneLineParser]") -> OneLineParser:
    parser = subparsers.add_parser(
        "simulate",
        help="run a trace of arrivals on a virtual clock",
        description=_DESCRIPTION,
        allow_abbrev=False,
        conflict_handler="resolve",
    )
    add = parser.add_argument
    add("--trace", required=True, metavar="FILE",
        help="CSV with arrival_s, input_tokens, output_tokens (and, if you like, priority, tenant), or JSON lines "
        "with timestamp, input_length, output_length, hash_ids")  # fmt: skip
    add("--limit", type=whole_number, metavar="N", help="only the first N requests")
    add("--concurrency", type=whole_number, metavar="N",
        help="keep N requests open, whatever times the trace gives (default: they come at their time)")  # fmt: skip
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--fit", metavar="RECORDING", help="fit the step times to this recording")
    model.add_argument("--step-model", choices=sorted(PRESETS), default=DEFAULT_STEP_MODEL,
                       help="step times to assume (default: %(default)s)")  # fmt: skip
    add("--json", action="store_true", help="print one JSON object")
    add("--plot", metavar="FILE.png", help="draw latencies, queues and blocks (needs matplotlib)")
    add_engine_options(parser)
    add("--num-device-blocks", type=pool_size, default=argparse.SUPPRESS, metavar="N",
        help="blocks on the device, the null block included, or `endless` (default: endless)")  # fmt: skip
    return parser


def run(args: argparse.Namespace) -> int:
    began_s = time.perf_counter()
    for option in ("limit", "concurrency"):
        if (value := getattr(args, option)) is not None and value < 1:
            raise UsageError(f"--{option}", f"must be at least 1, got {value}")
    if args.plot is not None:
        from deployments.cli.run_plot import check_can_plot

        check_can_plot(args.plot)
    requests = _requests(args.trace, args.limit)
    model = fitted_model("--fit", args.fit) if args.fit is not None else PRESETS[args.step_model]
    config = config_for_trace(
        args,
        device_type="cuda" if args.fit is None and args.step_model.startswith("gpu") else "cpu",
        longest=max(request.num_input_tokens + max(request.num_output_tokens, 1) for request in requests),
        num_tokens=sum(request.num_input_tokens + max(request.num_output_tokens, 1) for request in requests),
        num_requests=len(requests),
    )
    timeline = Timeline() if args.plot is not None else None
    report = _simulate(requests, config, model, args.concurrency, timeline)
    result = report.as_dict()
    if args.json:
        print(json.dumps(_as_json(args, config, model, result, time.perf_counter() - began_s)))
    else:
        wall_s = time.perf_counter() - began_s
        print(run_table({"simulated": result}))
        print(f"{result['run_s']:,.1f} s simulated in {wall_s:,.1f} s")
    if timeline is not None:
        from deployments.cli.run_plot import plot_run

        plot_run(args.plot, report, timeline, title=Path(args.trace).name)
    return 0


def _simulate(
    requests: list[TracedRequest],
    config: ResolvedConfig,
    model: StepModel,
    concurrency: int | None,
    timeline: Timeline | None,
) -> RunReport:
    blocks = BlockManager(config.block_size, config.num_device_blocks, config.num_host_blocks)
    recorder = _recorder(config.record)
    scheduler = Scheduler(config.scheduler_config(), blocks, recorder)
    scheduler.set_rates(*model.rates(config.max_num_batched_tokens, config.block_size))
    report = RunReport(blocks)
    listeners: list[RunListener] = [report] if timeline is None else [report, timeline]
    works = works_of(requests, config.block_size, config.max_model_len)
    if not config.enable_prefix_caching:
        works = (work.without_keys() for work in works)
    Simulator(scheduler, config.block_size, model, listeners, concurrency=concurrency).run(works)
    if recorder is not None:
        recorder.close()
        print(f"recorded to {recorder.path}", file=sys.stderr)
    return report


def _requests(path: str, limit: int | None) -> list[TracedRequest]:
    try:
        return read_trace(Path(path), limit)
    except OSError as error:
        raise UsageError("--trace", f"{path}: {error.strerror}") from error
    except TraceError as error:
        raise UsageError("--trace", str(error)) from error


def _recorder(path: str | None) -> Recorder | None:
    if path is None:
        return None
    try:
        return Recorder(path)
    except OSError as error:
        raise UsageError("--record", f"{path}: {error.strerror}") from error


def _as_json(
    args: argparse.Namespace, config: ResolvedConfig, model: StepModel, result: dict[str, Any], wall_s: float
) -> dict[str, Any]:
    simulated_s = result.pop("run_s")
    return {
        "trace": args.trace,
        "simulated_s": simulated_s,
        "wall_s": wall_s,
        "speedup": simulated_s / wall_s,
        **result,
        "step_model": {"name": args.step_model if args.fit is None else args.fit, **model.as_dict()},
        "options": {
            "max_model_len": config.max_model_len,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "max_num_seqs": config.max_num_seqs,
            "block_size": config.block_size,
            "num_device_blocks": config.num_device_blocks,
            "num_host_blocks": config.num_host_blocks,
            "chunk_alignment": config.chunk_alignment,
            "scheduler_policy": config.scheduler_policy.value,
            "preemption_mode": config.preemption_mode.value,
            "queue_policy": config.queue_policy.value,
            "enable_prefix_caching": config.enable_prefix_caching,
            "concurrency": args.concurrency,
        },
    }
