"""`AppArgs`: every option of the application, by the names of the command line.

Owns names, types and defaults of the serving options and passes the engine's on; what an engine option may be is
checked by `worker.config`. All reads of environment variables in this package are here.
"""

import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from worker.config import ConfigError, EngineConfig, check_engine_config, option_names, parse_bytes
from worker.tenant_weights import parse_tenant_weights

#: no usage reports; GPUs stay as they are where a replica asks for none (and no warning about it)
RAY_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
#: in place of the option, which others on the machine can read
PREFIX_CACHE_SECRET_VARIABLE = "STALLFREE_PREFIX_CACHE_SECRET"
#: most answers end by themselves in this time
DEFAULT_DRAIN_GRACE_S = 10.0


class AppArgs(BaseModel):
    """Arguments of `deployments.app:build`; unknown names are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(default="demo", min_length=1)
    served_model_name: str | None = Field(default=None, min_length=1)
    num_workers: int = Field(default=1, ge=1)
    chat_template: str | None = None
    metrics_host: str = "127.0.0.1"
    #: 0: no scrape port; the ingress's /metrics works either way
    metrics_port: int = Field(default=9400, ge=0, le=65535)
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
    #: most answers to one prompt: bounds `n`, `best_of` and `beam_width`
    max_n: int = Field(default=64, ge=1)
    #: no request is more urgent, whatever it asks (lower is more urgent)
    most_urgent_priority: int = Field(default=-100, ge=-100, le=100)
    #: names the HTTP header whose value is the tenant; without it all requests are one tenant's
    tenant_header: str | None = Field(default=None, pattern=r"^[A-Za-z0-9-]{1,64}$")

    # The engine's options, as `worker.config.EngineConfig` has them.
    revision: str | None = None
    trust_remote_code: bool = False
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    block_size: int = 16
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
    tensor_parallel_size: int = 1
    quantization: str | None = None
    enable_lora: bool = False

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
    def effective_drain_grace_s(self) -> float:
        """Below `drain_timeout_s`, at which Serve ends the replica. Raises `ConfigError` where it is not."""
        if self.drain_grace_s is None:
            return min(DEFAULT_DRAIN_GRACE_S, self.drain_timeout_s / 2)
        if self.drain_grace_s >= max(self.drain_timeout_s, 1e-9):
            raise ConfigError(
                "drain_grace_s", f"must be below drain_timeout_s ({self.drain_timeout_s:g}), got {self.drain_grace_s:g}"
            )
        return self.drain_grace_s

    def to_engine_config(self) -> EngineConfig:
        """Checked as far as it can be without a model. Raises `ConfigError`, which names the option."""
        values = {name: getattr(self, name) for name in option_names()}
        if isinstance(self.kv_cache_memory, str):
            try:
                values["kv_cache_memory"] = parse_bytes(self.kv_cache_memory)
            except ValueError as error:
                raise ConfigError("kv_cache_memory", str(error)) from error
        try:
            values["tenant_weights"] = parse_tenant_weights(self.tenant_weights)
        except ValueError as error:
            raise ConfigError("tenant_weights", str(error)) from error
        values["prefix_cache_secret"] = self.shared_prefix_cache_secret
        if self.record is not None:
            values["record"] = os.path.abspath(self.record)  # workers run in a folder of Ray's
        config = EngineConfig(**values)
        check_engine_config(config)
        return config


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
    return args


def prepare_ray_environment(packages: Path) -> None:
    """What Ray's processes inherit when they are started from here: they import our packages from the folder
    `packages`, as this process did, and report nothing to anybody. Variables that are set already stay."""
    rest = os.environ.get("PYTHONPATH")
    parts = [str(packages)] + ([] if rest is None else rest.split(os.pathsep))
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(parts))
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
