"""The engine's options where there is no model: what `simulate` and `replay` make a scheduler and its pools from.

Owns defaults that do not come from a model or a machine. Values are checked by `worker.config`.
"""

import argparse
from pathlib import Path
from typing import Any

from deployments.cli.options import UsageError, given_engine_options, option_of, usage_error, whole_number
from scheduler.recording_reader import Recording, RecordingError, is_recording
from scheduler.replay import Replayer
from scheduler.step_fit import FitError, StepTimes
from scheduler.step_model import StepModel
from worker.config import (
    DEFAULT_BLOCK_SIZE,
    ConfigError,
    EngineConfig,
    ResolvedConfig,
    blocks_for,
    resolve_engine_config,
)

#: as many blocks as all requests would take together: nothing is ever preempted, or falls out of the prefix cache
ENDLESS = "endless"
#: of an endless pool; the watermark comes out of it
_ENDLESS_MARGIN = 1.03
_NO_MODEL_LIMIT = 2**40
#: options that decide nothing where no model runs
_OF_A_MODEL = frozenset({
    "model", "revision", "trust_remote_code", "dtype", "device", "kv_cache_memory", "gpu_memory_utilization",
    "num_threads", "attention_backend", "enforce_eager", "cuda_graph_memory", "async_scheduling",
})  # fmt: skip


def pool_size(text: str) -> int | str:
    """Type of --num-device-blocks."""
    return ENDLESS if text == ENDLESS else whole_number(text)


def config_for_trace(
    args: argparse.Namespace, *, device_type: str, longest: int, num_tokens: int, num_requests: int
) -> ResolvedConfig:
    """Options for a trace whose longest request has `longest` tokens; all of them have `num_tokens`."""
    given = _given(args)
    max_model_len = given.setdefault("max_model_len", longest)
    if given.get("num_device_blocks", ENDLESS) == ENDLESS:
        block_size = max(int(given.get("block_size", DEFAULT_BLOCK_SIZE)), 1)
        num_blocks = num_tokens // block_size + 2 * num_requests + blocks_for(max(max_model_len, 1), block_size)
        given["num_device_blocks"] = int(num_blocks * _ENDLESS_MARGIN) + 2
        given.setdefault("num_host_blocks", 1)  # never used; a host pool of the same size would be for nothing
    return _resolve(EngineConfig(**given), device_type)


def config_for_recording(args: argparse.Namespace, recording: Recording) -> ResolvedConfig:
    """The recorded options with those changed that stand on the command line."""
    given = _given(args)
    if "record" in given:
        raise UsageError("--record", "a replay records nothing")
    pools = recording.pools
    recorded: dict[str, Any] = {
        **recording.options,
        "block_size": pools.block_size,
        "num_device_blocks": pools.num_device_blocks,
        "num_host_blocks": pools.num_host_blocks or None,
    }
    merged = recorded | given
    budget, reserved = merged["max_num_batched_tokens"], merged["min_prefill_tokens"]
    if "max_num_seqs" not in given and isinstance(budget, int) and isinstance(reserved, int):
        # As where it is chosen by the budget; a smaller budget need not be told twice.
        merged["max_num_seqs"] = max(min(recorded["max_num_seqs"], budget - reserved), 1)
    if "block_size" in given and "num_device_blocks" not in given:
        # The same memory in other blocks.
        num_slots = (pools.num_device_blocks - 1) * pools.block_size
        merged["num_device_blocks"] = num_slots // max(merged["block_size"], 1) + 1
        merged["num_host_blocks"] = pools.num_host_blocks * pools.block_size // max(merged["block_size"], 1) or None
    return _resolve(EngineConfig(**merged), "cpu")


def _given(args: argparse.Namespace) -> dict[str, Any]:
    given = given_engine_options(args)
    for name in sorted(_OF_A_MODEL & given.keys()):
        hint = ": use --num-device-blocks" if name == "kv_cache_memory" else ""
        raise UsageError(option_of(name), f"says nothing without a model{hint}")
    return given


def _resolve(config: EngineConfig, device_type: str) -> ResolvedConfig:
    try:
        return resolve_engine_config(
            config,
            device_type=device_type,
            model_max_len=_NO_MODEL_LIMIT,
            block_bytes=1,
            cache_memory_bytes=_NO_MODEL_LIMIT,
        )
    except ConfigError as error:
        raise usage_error(error) from error


def open_recording(option: str, path: str) -> Recording:
    try:
        if not is_recording(Path(path)):
            raise UsageError(option, f"{path} is not a recording (one is written by --record)")
        return Recording(Path(path))
    except OSError as error:
        raise UsageError(option, f"{path}: {error.strerror}") from error
    except RecordingError as error:
        raise UsageError(option, str(error)) from error


def fitted_model(option: str, path: str) -> StepModel:
    """The step-time model of the engine whose recording this is."""
    recording = open_recording(option, path)
    times = StepTimes(recording.pools.block_size)
    try:
        replayed = Replayer(recording, [times]).run()
        if replayed.difference is not None:
            raise UsageError(option, f"{path} was recorded by another version: step {replayed.difference.step_id} "
                             "is decided otherwise now")  # fmt: skip
        return times.fit()
    except (RecordingError, FitError) as error:
        raise UsageError(option, str(error)) from error
