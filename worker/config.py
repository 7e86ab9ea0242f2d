"""Every engine option: defaults, checks, and what they come to for one model and one machine.

Pure arithmetic: it loads no model and asks no device; sizes of the model and of free memory are arguments.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from scheduler.config import PreemptionMode, QueuePolicy, SchedulerConfig, SchedulerPolicy

DTYPES = ("auto", "float32", "float16", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")
ATTENTION_BACKENDS = ("auto", "torch_sdpa", "cpu_native", "flash_attn", "torch_varlen", "triton")
#: where the attention backend does not ask for larger blocks
DEFAULT_BLOCK_SIZE = 16
DEFAULT_BUDGET_TOKENS = {"cpu": 256, "cuda": 2048}
DEFAULT_MAX_NUM_SEQS = 256
#: the host pool is as large as the device's, up to this: pinned memory of any size is not to be taken unasked
DEFAULT_HOST_POOL_BYTES = 8 * 2**30
CUDA_CHUNK_ALIGNMENT = 256
#: of the device's memory, for captured decode steps; the cache leaves it free
DEFAULT_CUDA_GRAPH_BYTES = 2**30

_POSITIVE = (
    "max_model_len", "max_num_batched_tokens", "max_num_seqs", "block_size", "num_device_blocks", "num_host_blocks",
    "kv_cache_memory", "chunk_alignment", "num_threads", "cuda_graph_memory",
)  # fmt: skip
_NOT_NEGATIVE = ("max_num_partial_prefills", "long_prefill_threshold", "min_prefill_tokens")
#: options of what is not there yet, and the values that ask for nothing
NOT_YET = {"tensor_parallel_size": 1, "quantization": None, "enable_lora": False}
#: A prompt of max_model_len - 1 tokens gives one token; a model length of 1 could answer nothing.
_SHORTEST_MODEL_LEN = 2


class ConfigError(ValueError):
    """An option that cannot be used. `option` is its name, as in `EngineConfig` (dashed on the command line)."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(f"{option}: {message}")
        self.option = option


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Options as given. None means: choose by model and machine (`resolve_engine_config`).

    `num_device_blocks` counts the null block. `kv_cache_memory` and `cuda_graph_memory` are in bytes.
    `chunk_alignment`, partial prefills and thresholds are those of `SchedulerConfig`. `record` is the file that the
    scheduler's inputs are written to. `async_scheduling`: a step is planned while the one before it runs; by default
    on CUDA.
    """

    model: str = "demo"
    revision: str | None = None
    trust_remote_code: bool = False
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    block_size: int | None = None
    num_device_blocks: int | None = None
    num_host_blocks: int | None = None
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float = 0.9
    scheduler_policy: str = "chunked_prefill"
    preemption_mode: str = "auto"
    queue_policy: str = "fcfs"
    priority_aging_s: float = 60.0
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    enable_prefix_caching: bool = True
    prefix_cache_secret: str = field(default="", repr=False)
    chunk_alignment: int | None = None
    max_num_partial_prefills: int = 0
    long_prefill_threshold: int = 0
    min_prefill_tokens: int = 0
    target_itl_ms: float = 0.0
    record: str | None = None
    num_threads: int | None = None
    attention_backend: str = "auto"
    enforce_eager: bool = False
    cuda_graph_memory: int | None = None
    async_scheduling: bool | None = None
    tensor_parallel_size: int = 1
    quantization: str | None = None
    enable_lora: bool = False


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """Every size as a number, all rules checked. `notes` are sentences for the operator about what was chosen
    for them, such as a model length cut down to the pool."""

    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int
    num_device_blocks: int
    num_host_blocks: int
    chunk_alignment: int
    scheduler_policy: SchedulerPolicy
    preemption_mode: PreemptionMode
    queue_policy: QueuePolicy
    priority_aging_s: float
    tenant_weights: Mapping[str, float]
    enable_prefix_caching: bool
    prefix_cache_secret: str = field(repr=False)
    max_num_partial_prefills: int
    long_prefill_threshold: int
    min_prefill_tokens: int
    target_itl_ms: float
    record: str | None = None
    async_scheduling: bool = False
    notes: tuple[str, ...] = ()

    @property
    def max_blocks_per_sequence(self) -> int:
        return blocks_for(self.max_model_len, self.block_size)

    def scheduler_config(self) -> SchedulerConfig:
        return SchedulerConfig(
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            policy=self.scheduler_policy,
            preemption_mode=self.preemption_mode,
            queue_policy=self.queue_policy,
            priority_aging_s=self.priority_aging_s,
            tenant_weights=self.tenant_weights,
            chunk_alignment=self.chunk_alignment,
            max_num_partial_prefills=self.max_num_partial_prefills,
            long_prefill_threshold=self.long_prefill_threshold,
            min_prefill_tokens=self.min_prefill_tokens,
            target_itl_ms=self.target_itl_ms,
        )


def blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def check_engine_config(config: EngineConfig) -> None:
    """Everything that can be told without a model. Raises `ConfigError` for the first option that is wrong."""
    for option in _POSITIVE + _NOT_NEGATIVE:
        size = getattr(config, option)
        if size is None and option in _POSITIVE:
            continue
        if not isinstance(size, int) or isinstance(size, bool):
            raise ConfigError(option, f"must be a whole number, got {size!r}")
        if size < 0 or (size == 0 and option in _POSITIVE):
            lowest = "at least 1" if option in _POSITIVE else "0 (off) or more"
            raise ConfigError(option, f"must be {lowest}, got {size}")
    for option in ("gpu_memory_utilization", "priority_aging_s", "target_itl_ms"):
        if not _is_number(getattr(config, option)):
            raise ConfigError(option, f"must be a number, got {getattr(config, option)!r}")
    if config.max_model_len is not None and config.max_model_len < _SHORTEST_MODEL_LEN:
        raise ConfigError("max_model_len", f"must be at least {_SHORTEST_MODEL_LEN}, got {config.max_model_len}")
    if not 0.0 < config.gpu_memory_utilization <= 1.0:
        raise ConfigError(
            "gpu_memory_utilization", f"must be above 0 and at most 1, got {config.gpu_memory_utilization}"
        )
    _check_choice("dtype", config.dtype, DTYPES)
    _check_choice("device", config.device, DEVICES)
    _check_choice("attention_backend", config.attention_backend, ATTENTION_BACKENDS)
    _check_choice("scheduler_policy", config.scheduler_policy, tuple(policy.value for policy in SchedulerPolicy))
    _check_choice("preemption_mode", config.preemption_mode, tuple(mode.value for mode in PreemptionMode))
    if not 0.0 <= config.target_itl_ms < float("inf"):
        raise ConfigError("target_itl_ms", f"must be 0 (off) or more, got {config.target_itl_ms}")
    if config.target_itl_ms and config.scheduler_policy == SchedulerPolicy.DEFAULT.value:
        raise ConfigError("target_itl_ms", "scheduler_policy default runs prompts whole: use chunked_prefill")
    _check_choice("queue_policy", config.queue_policy, tuple(policy.value for policy in QueuePolicy))
    if not 0.0 < config.priority_aging_s < float("inf"):
        raise ConfigError("priority_aging_s", f"must be above 0 and finite, got {config.priority_aging_s}")
    for tenant, weight in config.tenant_weights.items():
        if not _is_number(weight) or not 0.0 < weight < float("inf"):
            raise ConfigError("tenant_weights", f"the weight of {tenant!r} must be a number above 0, got {weight}")
    for option, default in NOT_YET.items():
        if getattr(config, option) != default:
            raise ConfigError(option, f"is not available yet (got {getattr(config, option)!r})")
    if config.num_device_blocks is not None and config.kv_cache_memory is not None:
        raise ConfigError(
            "kv_cache_memory",
            f"gives the pool's size a second time (num_device_blocks is {config.num_device_blocks}): set one of them",
        )
    if config.max_num_batched_tokens is not None:
        _check_budget(config, config.max_num_batched_tokens)


def resolve_engine_config(
    config: EngineConfig,
    *,
    device_type: str,
    model_max_len: int,
    block_bytes: int,
    cache_memory_bytes: int,
    block_size: int = DEFAULT_BLOCK_SIZE,
) -> ResolvedConfig:
    """Fill in what was left open, for a model of `model_max_len` positions whose blocks take `block_bytes`, on a
    machine that can spare `cache_memory_bytes` for the cache, with an attention backend that likes blocks of
    `block_size`, each where the options do not say. Raises `ConfigError`."""
    check_engine_config(config)
    if config.max_model_len is not None and config.max_model_len > model_max_len:
        raise ConfigError("max_model_len", f"{config.max_model_len} is over the model's {model_max_len} positions")
    notes: list[str] = []
    block_size = config.block_size or block_size
    max_model_len = config.max_model_len or model_max_len
    num_device_blocks = _device_blocks(config, block_bytes, cache_memory_bytes)
    needed_blocks = blocks_for(max_model_len, block_size) + 1
    if num_device_blocks < needed_blocks:
        is_chosen = config.num_device_blocks is not None or config.kv_cache_memory is not None
        fitting_len = (num_device_blocks - 1) * block_size
        if is_chosen or config.max_model_len is not None or fitting_len < _SHORTEST_MODEL_LEN:
            raise ConfigError(
                "num_device_blocks" if config.num_device_blocks is not None else "kv_cache_memory",
                f"{num_device_blocks} blocks of {block_size} cannot hold one sequence of max_model_len "
                f"{max_model_len}, which takes {needed_blocks} with the null block: "
                "enlarge the pool or lower max_model_len",
            )
        notes.append(
            f"max_model_len is {fitting_len} instead of the model's {max_model_len}: "
            f"the cache of {num_device_blocks} blocks of {block_size} holds no more"
        )
        max_model_len = fitting_len

    policy = SchedulerPolicy(config.scheduler_policy)
    mode = PreemptionMode(config.preemption_mode)
    budget = config.max_num_batched_tokens
    if policy is SchedulerPolicy.DEFAULT:
        budget = max_model_len if budget is None else budget
        if budget < max_model_len:
            raise ConfigError(
                "max_num_batched_tokens",
                f"{budget} is below max_model_len {max_model_len}, and scheduler_policy default runs prompts whole",
            )
    elif budget is None:
        # An explicit number of sequences or of reserved tokens that the default does not cover raises it.
        budget = max(DEFAULT_BUDGET_TOKENS[device_type], (config.max_num_seqs or 1) + config.min_prefill_tokens)
    _check_budget(config, budget)
    max_num_seqs = config.max_num_seqs or min(DEFAULT_MAX_NUM_SEQS, budget - config.min_prefill_tokens)
    alignment = config.chunk_alignment or (CUDA_CHUNK_ALIGNMENT if device_type == "cuda" else block_size)
    default_host_blocks = 0
    if mode is not PreemptionMode.RECOMPUTE:
        default_host_blocks = max(min(num_device_blocks, DEFAULT_HOST_POOL_BYTES // block_bytes), 1)
    return ResolvedConfig(
        max_model_len=max_model_len,
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        block_size=block_size,
        num_device_blocks=num_device_blocks,
        num_host_blocks=default_host_blocks if config.num_host_blocks is None else config.num_host_blocks,
        # An alignment over the budget would floor every chunk to nothing.
        chunk_alignment=min(alignment, budget),
        scheduler_policy=policy,
        preemption_mode=mode,
        queue_policy=QueuePolicy(config.queue_policy),
        priority_aging_s=config.priority_aging_s,
        tenant_weights=config.tenant_weights,
        enable_prefix_caching=config.enable_prefix_caching,
        prefix_cache_secret=config.prefix_cache_secret,
        max_num_partial_prefills=config.max_num_partial_prefills,
        long_prefill_threshold=config.long_prefill_threshold,
        min_prefill_tokens=config.min_prefill_tokens,
        target_itl_ms=config.target_itl_ms,
        record=config.record,
        # Where model and scheduler share the processors there is nothing to gain.
        async_scheduling=device_type == "cuda" if config.async_scheduling is None else config.async_scheduling,
        notes=tuple(notes),
    )


def _device_blocks(config: EngineConfig, block_bytes: int, cache_memory_bytes: int) -> int:
    if config.num_device_blocks is not None:
        return config.num_device_blocks
    return (config.kv_cache_memory or cache_memory_bytes) // block_bytes


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_choice(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(option, f"must be one of {', '.join(choices)}, got {value!r}")


def _check_budget(config: EngineConfig, budget: int) -> None:
    if config.max_num_seqs is not None and budget < config.max_num_seqs:
        raise ConfigError("max_num_batched_tokens", f"{budget} is below max_num_seqs {config.max_num_seqs}")
    max_num_seqs = config.max_num_seqs or 1
    if max_num_seqs + config.min_prefill_tokens > budget:
        raise ConfigError(
            "min_prefill_tokens",
            f"{config.min_prefill_tokens} and max_num_seqs {max_num_seqs} "
            f"together are over max_num_batched_tokens {budget}",
        )


def option_names() -> tuple[str, ...]:
    """Names of all options, in the order of `EngineConfig`."""
    return tuple(option.name for option in fields(EngineConfig))
