"""The engine's options on the command line, shared by `serve` and `generate`, and how a wrong one is reported.

Names are those of `EngineConfig`, with dashes. Owns no rule about values: `worker.config` checks them. Loads no torch.
"""

import argparse
from typing import Any, NoReturn

from scheduler.config import PreemptionMode, QueuePolicy
from worker.byte_sizes import parse_bytes
from worker.config import (
    ATTENTION_BACKENDS,
    DEFAULT_BUDGET_TOKENS,
    DEFAULT_CUDA_GRAPH_BYTES,
    DEFAULT_MAX_NUM_SEQS,
    DEVICES,
    DTYPES,
    NOT_YET,
    ConfigError,
    EngineConfig,
    check_engine_config,
)
from worker.tenant_weights import parse_tenant_weights

PROGRAM = "stallfree"
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
#: how argparse begins what it says of options that no parser has
_UNKNOWN = "unrecognized arguments: "


class UsageError(Exception):
    """The command cannot be carried out as given; `option` (with its dashes, or any other name) is at fault."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(f"{option}: {message}")


class OneLineParser(argparse.ArgumentParser):
    """Reports a bad command line in one line; the usage is what --help is for."""

    def error(self, message: str) -> NoReturn:
        if message.startswith(_UNKNOWN):
            option = message.removeprefix(_UNKNOWN).split()[0].partition("=")[0]
            if option in _NOT_YET:
                message = f"{option}: is not available yet"
        self.exit(EXIT_USAGE, error_line(message.removeprefix("argument ")))


def error_line(message: str) -> str:
    return f"{PROGRAM}: error: {' '.join(message.split())}\n"


def option_of(name: str) -> str:
    """The command line's spelling of an option of `EngineConfig`."""
    return "--" + name.replace("_", "-")


#: users of other servers know this one as well
_NOT_YET = frozenset({*map(option_of, NOT_YET), "--lora-modules"})


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Options that are not given leave no trace in the namespace, so that a configuration file can fill them in."""
    group = parser.add_argument_group("engine")

    def add(name: str, help_text: str, **settings: Any) -> None:
        default = EngineConfig.__dataclass_fields__[name].default
        if default and isinstance(default, str | int | float) and not isinstance(default, bool):
            help_text += f" (default: {default})"
        group.add_argument(option_of(name), default=argparse.SUPPRESS, help=help_text.replace("%", "%%"), **settings)

    def add_count(name: str, help_text: str) -> None:
        add(name, help_text, type=whole_number, metavar="N")

    add("model", "demo, a folder with safetensors, or a Hub id")
    add("revision", "branch, tag or commit of a Hub id")
    add("trust_remote_code", "run model code that comes with the weights", action="store_true")
    add("dtype", "of weights and cache; auto: what the weights are in", choices=DTYPES)
    add("device", "auto: CUDA where there is one", choices=DEVICES)
    add_count("max_model_len", "longest prompt and answer together, in tokens (default: the model's)")
    budgets = " and ".join(f"{tokens} on {device}" for device, tokens in DEFAULT_BUDGET_TOKENS.items())
    add_count(
        "max_num_batched_tokens",
        f"token budget of one step (default: {budgets}; with --scheduler-policy default: the model length)",
    )
    add_count("max_num_seqs", f"most sequences in one step (default: {DEFAULT_MAX_NUM_SEQS}, or the budget if lower)")
    add_count("block_size", "tokens in one block of the KV cache (default: 16, or 256 where attention needs that)")
    add_count("num_device_blocks", "blocks on the device, the null block included (default: by memory)")
    add_count("num_host_blocks", "blocks in host memory, for swapping (default: as on the device, none for recompute)")
    add("kv_cache_memory", "device memory of the KV cache, such as 512MiB", type=_size_in_bytes, metavar="SIZE")
    add("gpu_memory_utilization", "share of a GPU's memory to use", type=float, metavar="SHARE")
    add(
        "scheduler_policy",
        "chunked_prefill: decodes first, prompts in chunks; default: prompts first and whole",
        choices=("chunked_prefill", "default"),
    )
    add(
        "preemption_mode",
        "what becomes of a preempted sequence's blocks; auto: what is estimated to cost less",
        choices=[mode.value for mode in PreemptionMode],
    )
    add(
        "queue_policy",
        "who comes in first: fcfs: the oldest; priority: the lowest `priority` of a request; fair: the tenant "
        "served least",
        choices=[policy.value for policy in QueuePolicy],
    )
    add("priority_aging_s", "so many seconds of waiting are worth one level of priority", type=float, metavar="S")
    add(
        "tenant_weights",
        "shares under fair, such as a=1,b=3; a tenant not named weighs 1",
        type=_weights,
        metavar="WEIGHTS",
    )
    add(
        "enable_prefix_caching",
        "keep blocks of past prompts and answers and reuse them for the same beginnings (default: on)",
        action=argparse.BooleanOptionalAction,
    )
    add(
        "prefix_cache_secret",
        "keys of cached blocks are made with it (default: random; serve also reads STALLFREE_PREFIX_CACHE_SECRET, "
        "which others on the machine cannot see)",
        metavar="SECRET",
    )
    add_count("chunk_alignment", "cut chunks are multiples of it (default: 256 on CUDA, else the block size)")
    add_count("max_num_partial_prefills", "most prompts that are mid-way at once; 0: no limit")
    add_count(
        "long_prefill_threshold",
        "longer prompts share what shorter ones leave, so that short newcomers need not wait for them; 0: off, all "
        "wait their turn",
    )
    add_count("min_prefill_tokens", "part of the budget that decodes leave to prompts")
    add(
        "target_itl_ms",
        "hold prompt tokens down so that running answers get a token about that often, in ms; 0: off",
        type=float,
        metavar="MS",
    )
    add("record", "write the scheduler's inputs to FILE (or FILE.1, ... if it is there), for replay", metavar="FILE")
    add(
        "attention_backend",
        "auto: on a CPU its kernels where they serve the model, on CUDA flash_attn, triton or torch_varlen, whichever "
        "of them can, in that order; else torch_sdpa",
        choices=ATTENTION_BACKENDS,
    )
    add("enforce_eager", "launch each decode step kernel by kernel, without CUDA graphs", action="store_true")
    add(
        "cuda_graph_memory",
        f"most device memory for CUDA graphs, such as 512MiB (default: {DEFAULT_CUDA_GRAPH_BYTES // 2**20}MiB); sizes "
        "of steps that do not fit run without",
        type=_size_in_bytes,
        metavar="SIZE",
    )
    add(
        "async_scheduling",
        "plan a step while the one before it runs (default: on CUDA, where the model leaves the processors free)",
        action=argparse.BooleanOptionalAction,
    )
    add_count(
        "num_threads", "CPU threads of the model (default: all cores; served: shared by workers, one left if over two)"
    )


def given_engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The engine options that stand on the command line, by the names of `EngineConfig`."""
    return {name: value for name, value in vars(args).items() if name in EngineConfig.__dataclass_fields__}


def engine_config_from(args: argparse.Namespace) -> EngineConfig:
    """The engine's configuration, checked as far as that goes without a model. Raises `UsageError`."""
    config = EngineConfig(**given_engine_options(args))
    try:
        check_engine_config(config)
    except ConfigError as error:
        raise usage_error(error) from error
    return config


def usage_error(error: ConfigError) -> UsageError:
    return UsageError(option_of(error.option), str(error).removeprefix(f"{error.option}: "))


def whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None


def _weights(text: str) -> dict[str, float]:
    try:
        return parse_tenant_weights(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _size_in_bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
