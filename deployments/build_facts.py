"""What a process runs, for the info metrics: versions, options as they were given, and what was chosen by them."""

from importlib.metadata import version
from platform import python_version

from deployments.model_facts import ModelFacts
from worker.config import EngineConfig


def worker_info(config: EngineConfig, facts: ModelFacts) -> dict[str, str]:
    """By the labels of `stallfree_worker_info`."""
    return {
        "version": version("stallfree"),
        "torch": version("torch"),
        "device": config.device,
        "dtype": config.dtype,
        "attention_backend": facts.attention_backend or config.attention_backend,
        "block_size": str(facts.block_size),
        "max_model_len": str(facts.max_model_len),
        "scheduler_policy": config.scheduler_policy,
        "queue_policy": str(config.queue_policy),
        "preemption_mode": str(config.preemption_mode),
        "prefix_caching": "on" if config.enable_prefix_caching else "off",
    }


def ingress_build() -> dict[str, str]:
    """By the labels of `stallfree_build_info`."""
    return {"version": version("stallfree"), "python": python_version(), "ray": version("ray")}
