"""`stallfree replay`: a recording through the same scheduler again; with other options, what would have differed.

Owns the command's options and its output. Replay, simulation and comparison are `scheduler`'s.
"""

import argparse
import json
from dataclasses import asdict, dataclass
from typing import Any

from deployments.cli.options import (
    EXIT_FAILED,
    OneLineParser,
    UsageError,
    add_engine_options,
    given_engine_options,
)
from deployments.cli.run_table import run_table
from deployments.cli.virtual_engine import config_for_recording, fitted_model, open_recording
from scheduler.comparison import DecisionLog, StepDifference, differing_steps, simulate
from scheduler.recording_reader import Pools, Recording, RecordingError
from scheduler.replay import Difference, Replayed, Replayer
from scheduler.run_report import RunReport
from scheduler.step_fit import FitError, StepTimes
from scheduler.step_model import StepModel
from worker.config import ResolvedConfig

#: steps that are printed of those that differ
MAX_PRINTED = 5
MEDIANS = ("ttft_s", "inter_token_s", "end_to_end_s")

_DESCRIPTION = """\
Runs what --record wrote through the scheduler and the block manager of this version and checks that every decision
is the recorded one; exits with 1 if one is not. With options of the engine it is a what-if: the recorded requests
and cancels run on a virtual clock, with step times fitted to the recording, under the recorded options and under
the changed ones."""


def add_parser(subparsers: "argparse._SubParsersAction[OneLineParser]") -> OneLineParser:
    parser = subparsers.add_parser(
        "replay", help="run a recording again, or ask what if", description=_DESCRIPTION, allow_abbrev=False
    )
    parser.add_argument("recording", metavar="RECORDING", help="what --record wrote")
    parser.add_argument("--predict", action="store_true",
                        help="also simulate the run with step times fitted to it, and print the errors")  # fmt: skip
    parser.add_argument("--fit", metavar="RECORDING", help="fit the step times to this recording instead")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_options(parser)
    return parser


@dataclass(slots=True)
class _Baseline:
    """The recording as it was: its decisions, its measured times and what each request came to."""

    recording: Recording
    replayed: Replayed
    measured: RunReport
    times: StepTimes
    log: DecisionLog


def run(args: argparse.Namespace) -> int:
    is_what_if = bool(given_engine_options(args))
    recording = open_recording("RECORDING", args.recording)
    changed = config_for_recording(args, recording) if is_what_if else None
    if changed is not None:
        _check_block_size(changed, recording)
    try:
        baseline = _replay(recording, wants_log=is_what_if)
        result: dict[str, Any] = {
            "num_requests": baseline.replayed.num_requests,
            "num_steps": baseline.replayed.num_steps,
            "num_identical_steps": baseline.replayed.num_identical_steps,
            "identical_share": baseline.replayed.identical_share,
            "difference": _difference_dict(baseline.replayed.difference),
            "measured": baseline.measured.as_dict(),
        }
        if baseline.replayed.difference is None and (changed is not None or args.predict or args.fit is not None):
            model = fitted_model("--fit", args.fit) if args.fit is not None else baseline.times.fit()
            result |= _predict(baseline, model, changed)
    except (RecordingError, FitError) as error:
        raise UsageError("RECORDING", str(error)) from error
    if args.json:
        print(json.dumps(result))
    else:
        _print(result)
    return 0 if baseline.replayed.difference is None else EXIT_FAILED


def _replay(recording: Recording, *, wants_log: bool) -> _Baseline:
    times, log = StepTimes(recording.pools.block_size), DecisionLog()
    replayer = Replayer(recording, [])
    measured = RunReport(replayer.blocks)
    replayer.listeners += [measured, times, log] if wants_log else [measured, times]
    return _Baseline(recording, replayer.run(), measured, times, log)


def _predict(baseline: _Baseline, model: StepModel, changed: ResolvedConfig | None) -> dict[str, Any]:
    """The run on the virtual clock, as recorded and with what is changed."""
    recording, works, rates = baseline.recording, baseline.replayed.works, baseline.replayed.rates
    log = DecisionLog() if changed is not None else None
    simulated = simulate(works, recording.config, recording.pools, model, rates, log).as_dict()
    measured = baseline.measured.as_dict()
    result: dict[str, Any] = {
        "step_model": model.as_dict(),
        "simulated": simulated,
        "prediction_errors": {
            name: simulated[name]["p50"] / measured[name]["p50"] - 1.0
            for name in MEDIANS
            if measured[name]["p50"] and simulated[name]["p50"] is not None
        },
    }
    if changed is None or log is None:
        return result
    pools = Pools(
        changed.block_size, changed.num_device_blocks, changed.num_host_blocks, recording.pools.watermark
    )
    changed_works = [
        work.under(
            block_size_factor=changed.block_size // recording.pools.block_size,
            has_prefix_cache=changed.enable_prefix_caching,
            max_num_tokens=(recording.config.max_model_len, changed.max_model_len),
        )
        for work in works
    ]
    changed_log = DecisionLog()
    what_if = simulate(changed_works, changed.scheduler_config(), pools, model, rates, changed_log)
    different = differing_steps(log, changed_log)
    result |= {
        "what_if": what_if.as_dict(),
        "first_recorded_difference": _first_recorded_difference(baseline, changed, pools),
        "num_compared_steps": len(log.lines.keys() | changed_log.lines.keys()),
        "num_different_steps": len(different),
        "different_steps": [_step_dict(difference) for difference in different[:MAX_PRINTED]],
    }
    return result


def _first_recorded_difference(
    baseline: _Baseline, changed: ResolvedConfig, pools: Pools
) -> dict[str, Any] | None:
    """Given the recorded inputs at their recorded times, the first step that is decided otherwise."""
    recording = baseline.recording
    if pools.block_size != recording.pools.block_size or not changed.enable_prefix_caching:
        return None  # the recorded inputs name blocks of the recorded size
    replayed = Replayer(recording, [], changed.scheduler_config(), pools).run()
    if replayed.difference is None:
        return None
    step_id = replayed.difference.step_id
    return {
        "step": step_id,
        "time_s": replayed.difference.time_s,
        "before": baseline.log.lines.get(step_id),
        "after": replayed.difference.decision,
    }


def _check_block_size(changed: ResolvedConfig, recording: Recording) -> None:
    if changed.block_size % recording.pools.block_size:
        raise UsageError(
            "--block-size",
            f"{changed.block_size} is not a multiple of the recorded {recording.pools.block_size}, "
            "and it is blocks of that size that the recording names",
        )


def _difference_dict(difference: Difference | None) -> dict[str, Any] | None:
    if difference is None:
        return None
    return {"step": difference.step_id, "time_s": difference.time_s, "decision": difference.decision}


def _step_dict(difference: StepDifference) -> dict[str, Any]:
    values = asdict(difference)
    return {"step": values.pop("step_id"), **values}


def _print(result: dict[str, Any]) -> None:
    # Rounded down: 100.0% is said of nothing less.
    share = int(result["identical_share"] * 1000) / 10
    print(f"{result['num_requests']:,} requests, {result['num_steps']:,} steps, {share:.1f}% identical")
    if (difference := result["difference"]) is not None:
        print(f"step {difference['step']} at {difference['time_s']:.3f} s is decided otherwise now:")
        print(f"  {difference['decision']}")
        return
    if "simulated" not in result:
        return
    if "what_if" in result:
        _print_differences(result)
    columns = {"measured": result["measured"], "simulated as recorded": result["simulated"]}
    if "what_if" in result:
        columns["simulated as asked"] = result["what_if"]
    print(run_table(columns))
    errors = ", ".join(f"{name} {round(error, 3) + 0.0:+.1%}" for name, error in result["prediction_errors"].items())
    print(f"error of the simulated medians: {errors}")


def _print_differences(result: dict[str, Any]) -> None:
    if (first := result["first_recorded_difference"]) is not None:
        print(f"the first recorded step that is decided otherwise is step {first['step']}:")
        print(f"  recorded: {first['before']}")
        print(f"  as asked: {first['after']}")
    print(f"{result['num_different_steps']:,} of {result['num_compared_steps']:,} simulated steps differ")
    for step in result["different_steps"]:
        print(f"  step {step['step']}: {step['before'] or 'no such step'} | {step['after'] or 'no such step'}")
