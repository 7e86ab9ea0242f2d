"""`AppArgs`: every option of the application, by the names of the command line.

Owns names, types and defaults of the serving options and passes the engine's on; what an engine option may be is
checked by `worker.config`. All reads of environment variables in this package are here.
"""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from deployments.keys import KeyRing, KeysError
from deployments.request_log import OFF
from deployments.tool_calls.names import ReasoningParserName, ToolCallParserName
from worker.byte_sizes import parse_bytes
from worker.config import ConfigError, EngineConfig, check_engine_config, option_names
from worker.tenant_weights import parse_tenant_weights

#: Ray's processes: no usage reports; GPUs stay as they are where a replica asks for none (and no warning about it).
#: Serve's: the proxy reaches the ingress over gRPC and routes on its own loop, which costs less processor time a chunk;
#: gRPC's messages may be as long as any request or response (its own limit is 4 MiB, and Serve sends what is there as
#: one); request logs go to files alone, many lines at a time; headers that the proxy cannot read never reach it
RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_SERVE_PROXY_USE_GRPC": "1",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(512 * 1024 * 1024),
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1000",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "deployments.proxy_headers.middlewares",
}
#: in place of the option, which others on the machine can read
PREFIX_CACHE_SECRET_VARIABLE = "STALLFREE_PREFIX_CACHE_SECRET"
#: the text of a key file, in place of one
API_KEYS_VARIABLE = "STALLFREE_API_KEYS"
#: of options, where a number may stand
_NUMERIC_KINDS = {int, float, dict[str, float]}
#: most answers end by themselves in this time
DEFAULT_DRAIN_GRACE_S = 10.0


class AppArgs(BaseModel):
    """Arguments of `deployments.app:build`; unknown names are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(default="demo", min_length=1)
    served_model_name: str | None = Field(default=None, min_length=1)
    num_workers: int = Field(default=1, ge=1)
    #: with different bounds an autoscaler chooses between them, from `num_workers` on; absent ones are `num_workers`
    min_workers: int | None = Field(default=None, ge=1)
    max_workers: int | None = Field(default=None, ge=1)
    #: more workers are wanted where the waiting prompts would take the present ones longer than this
    target_queue_s: float = Field(default=2.0, gt=0, allow_inf_nan=False)
    #: how long more, or fewer, workers must have been wanted
    scale_up_delay_s: float = Field(default=10.0, ge=0)
    scale_down_delay_s: float = Field(default=300.0, ge=0)
    #: replicas of the HTTP API
    num_ingress: int = Field(default=1, ge=1)
    chat_template: str | None = None
    tool_call_parser: ToolCallParserName = "auto"
    reasoning_parser: ReasoningParserName = "auto"
    metrics_host: str = "127.0.0.1"
    #: 0: no scrape port; the ingress's /metrics works either way
    metrics_port: int = Field(default=9400, ge=0, le=65535)
    #: the metrics under vLLM's names, too, for what was made for it
    vllm_metric_names: bool = False
    #: where each ended request gets a line; `off`: nowhere; by default Serve's log of the ingress replica
    request_log: str | None = Field(default=None, min_length=1)
    #: a worker that sends no frame for so long has failed
    stall_timeout_s: float = Field(default=5.0, gt=0.5)
    #: a step that runs for so long is stuck
    step_timeout_s: float = Field(default=60.0, gt=0)
    #: until some worker takes a request in
    accept_timeout_s: float = Field(default=30.0, gt=0)
    #: answers that are running when a replica is told to stop have so long to end
    drain_timeout_s: float = Field(default=20.0, ge=0)
    #: answers of a worker that is told to stop go on elsewhere after so long; by default 10, or half of the above
    drain_grace_s: float | None = Field(default=None, ge=0)
    #: no request takes longer, whatever it asks; 0: as long as it takes
    request_timeout_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    #: a stream is not silent for longer; 0: off
    keep_alive_s: float = Field(default=15.0, ge=0, allow_inf_nan=False)
    #: prompt tokens that may wait at one worker; 0: any; by default 128 steps of the whole token budget
    max_queued_tokens: int | None = Field(default=None, ge=0)
    #: requests that may wait at one worker; 0: any
    max_queued_requests: int = Field(default=1024, ge=0)
    #: calls that may be open at one ingress replica; 0: any
    max_open_requests: int = Field(default=4096, ge=0)
    #: most answers to one prompt: bounds `n`, `best_of` and `beam_width`
    max_n: int = Field(default=64, ge=1)
    #: no request is more urgent, whatever it asks (lower is more urgent)
    most_urgent_priority: int = Field(default=-100, ge=-100, le=100)
    #: where OpenTelemetry spans of requests go, over OTLP and HTTP; none by default
    otlp_endpoint: str | None = Field(default=None, pattern=r"^https?://[^\s]+$")
    #: names the HTTP header whose value is the tenant; without it all requests are one tenant's
    tenant_header: str | None = Field(default=None, pattern=r"^[A-Za-z0-9-]{1,64}$")

    #: JSON or YAML list of `{key, tenant, admin, weight, max_priority}`; with it every route wants a key
    api_key_file: str | None = Field(default=None, min_length=1)
    #: origins, separated by commas, whose pages may ask (`*`: all); none by default
    cors_origin: str | None = Field(default=None, pattern=r"^(\*|https?://[^,\s*/]+(,https?://[^,\s*/]+)*)$")

    # The engine's options, as `worker.config.EngineConfig` has them.
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
    kv_cache_memory: int | str | None = None
    gpu_memory_utilization: float = 0.9
    scheduler_policy: str = "chunked_prefill"
    preemption_mode: str = "auto"
    queue_policy: str = "fcfs"
    priority_aging_s: float = 60.0
    tenant_weights: dict[str, float] | str = Field(default_factory=dict)
    enable_prefix_caching: bool = True
    prefix_cache_secret: str = Field(default="", repr=False)
    chunk_alignment: int | None = None
    max_num_partial_prefills: int = 0
    long_prefill_threshold: int = 0
    min_prefill_tokens: int = 0
    target_itl_ms: float = 0.0
    record: str | None = Field(default=None, min_length=1)
    num_threads: int | None = None
    attention_backend: str = "auto"
    enforce_eager: bool = False
    cuda_graph_memory: int | str | None = None
    async_scheduling: bool | None = None
    tensor_parallel_size: int = 1
    quantization: str | None = None
    enable_lora: bool = False

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_truth_value(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML's `true` and `yes` are no numbers, which pydantic would make of them."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        kinds = {annotation, *get_args(annotation)}
        values = value.values() if isinstance(value, dict) else (value,)
        if bool not in kinds and kinds & _NUMERIC_KINDS and any(isinstance(one, bool) for one in values):
            raise PydanticCustomError("number_type", "must be a number, not true or false")
        return value

    @field_validator("otlp_endpoint")
    @classmethod
    def _has_exporter(cls, endpoint: str | None) -> str | None:
        if endpoint is not None and find_spec("opentelemetry.exporter.otlp") is None:
            raise ValueError("needs the extra `tracing`: pip install 'stallfree[tracing]'")
        return endpoint

    @property
    def model_name(self) -> str:
        """What clients call the model: the given name, or a folder's last part, or the model as it was given."""
        if self.served_model_name is not None:
            return self.served_model_name
        is_path = self.model.startswith(("/", "./", "../", "~"))
        return Path(self.model).name if is_path else self.model

    @property
    def shared_prefix_cache_secret(self) -> str:
        """What all workers make block keys with: the option, else the environment's; "" lets each draw its own."""
        return self.prefix_cache_secret or os.environ.get(PREFIX_CACHE_SECRET_VARIABLE, "")

    @property
    def cors_origins(self) -> tuple[str, ...]:
        return () if self.cors_origin is None else tuple(self.cors_origin.split(","))

    def key_ring(self) -> KeyRing | None:
        """The keys of the file, else of the environment; None: nobody needs a key. Raises `ConfigError`."""
        if self.api_key_file is not None:
            option = "api_key_file"
            try:
                text = Path(self.api_key_file).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                # A decoding error quotes what it could not read.
                reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
                raise ConfigError(option, f"cannot read {self.api_key_file}: {reason}") from None
        elif API_KEYS_VARIABLE in os.environ:
            option, text = API_KEYS_VARIABLE, os.environ[API_KEYS_VARIABLE]
        else:
            return None
        if self.tenant_header is not None:
            raise ConfigError("tenant_header", "not together with API keys: a key says whose request it is")
        try:
            return KeyRing.parse(text)
        except KeysError as error:
            raise ConfigError(option, str(error)) from None

    @property
    def effective_request_log(self) -> str | None:
        """Replicas run in a folder of Ray's."""
        return self.request_log if self.request_log in (None, OFF) else os.path.abspath(str(self.request_log))

    @property
    def declared_tenants(self) -> tuple[str, ...]:
        """Those that the operator names, beside API keys or with a weight: they alone have metrics of their own."""
        keys = self.key_ring()
        from_keys = keys.tenants if keys is not None else ()
        return tuple(dict.fromkeys((*from_keys, *parse_tenant_weights(self.tenant_weights))))

    @property
    def effective_drain_grace_s(self) -> float:
        """Below `drain_timeout_s`, at which Serve ends the replica. Raises `ConfigError` where it is not."""
        if self.drain_grace_s is None:
            return min(DEFAULT_DRAIN_GRACE_S, self.drain_timeout_s / 2)
        if self.drain_grace_s >= max(self.drain_timeout_s, 1e-9):
            raise ConfigError(
                "drain_grace_s", f"must be below drain_timeout_s ({self.drain_timeout_s:g}), got {self.drain_grace_s:g}"
            )
        return self.drain_grace_s

    @property
    def worker_bounds(self) -> tuple[int, int]:
        """The fewest and the most workers. Raises `ConfigError` where there is nothing between them, or not the number
        to begin with."""
        fewest = self.num_workers if self.min_workers is None else self.min_workers
        most = self.num_workers if self.max_workers is None else self.max_workers
        if most < fewest:
            option = "min_workers" if self.max_workers is None else "max_workers"
            raise ConfigError(option, f"between {fewest} and {most} workers there is no number to choose")
        if "num_workers" in self.model_fields_set and not fewest <= self.num_workers <= most:
            raise ConfigError(
                "num_workers", f"{self.num_workers} is not between min_workers {fewest} and max_workers {most}"
            )
        return fewest, most

    @property
    def num_first_workers(self) -> int:
        """How many there are before anything is known of the work. Raises `ConfigError` as `worker_bounds` does."""
        fewest, most = self.worker_bounds
        return min(max(self.num_workers, fewest), most)

    def to_engine_config(self) -> EngineConfig:
        """Checked as far as it can be without a model. Raises `ConfigError`, which names the option."""
        values = {name: getattr(self, name) for name in option_names()}
        for option in ("kv_cache_memory", "cuda_graph_memory"):
            if isinstance(values[option], str):
                try:
                    values[option] = parse_bytes(values[option])
                except ValueError as error:
                    raise ConfigError(option, str(error)) from error
        keys = self.key_ring()
        try:
            values["tenant_weights"] = self._all_tenant_weights(keys)
        except ValueError as error:
            raise ConfigError("tenant_weights", str(error)) from error
        values["prefix_cache_secret"] = self.shared_prefix_cache_secret
        if self.record is not None:
            values["record"] = os.path.abspath(self.record)  # workers run in a folder of Ray's
        config = EngineConfig(**values)
        check_engine_config(config)
        return config

    def _all_tenant_weights(self, keys: KeyRing | None) -> dict[str, float]:
        """Those of the option and those that stand beside the keys. Raises ValueError where they disagree."""
        weights = parse_tenant_weights(self.tenant_weights)
        for tenant, weight in (keys.tenant_weights if keys is not None else {}).items():
            if weights.setdefault(tenant, weight) != weight:
                raise ValueError(f"{tenant!r} has another weight beside its API key")
        return weights


def app_args_from(values: dict[str, Any]) -> AppArgs:
    """Checks what can be checked before anything is loaded. Raises `ConfigError` for the first wrong option."""
    try:
        args = AppArgs.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        option = str(first["loc"][0]) if first["loc"] else "options"
        if first["type"] == "extra_forbidden":
            raise ConfigError(option, "there is no such option") from None
        given = "" if option == "prefix_cache_secret" else f", got {first['input']!r}"
        raise ConfigError(option, f"{first['msg']}{given}") from None
    args.to_engine_config()
    _ = args.effective_drain_grace_s
    _ = args.worker_bounds
    return args


def prepare_ray_environment(packages: Path) -> None:
    """What Ray's processes inherit when they are started from here: they import our packages from the folder
    `packages`, as this process did, and report nothing to anybody. Variables that are set already stay."""
    rest = os.environ.get("PYTHONPATH")
    parts = [str(packages)] + ([] if rest is None else rest.split(os.pathsep))
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(parts))
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
