"""The Serve application: `build(args)` wires ingress, router and workers, and nothing else does.

`deployments.app:build` is the import path for Serve configs; `app` is the application with all defaults.
"""

from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from deployments.config import AppArgs
from deployments.ingress import Ingress, IngressSettings
from deployments.serve_client import ClientTimeouts
from deployments.worker_replica import WorkerReplica, WorkerSettings

#: names of the deployments: configs refer to them
WORKER_NAME = "Worker"
INGRESS_NAME = "Ingress"

#: Serve's own limit on requests in a replica; ours are the scheduler's
MAX_ONGOING_REQUESTS = 100_000
#: a small machine runs all replicas: they share its processors by themselves
NUM_CPUS_PER_REPLICA = 0.1
HEALTH_CHECK_PERIOD_S = 2.0
HEALTH_CHECK_TIMEOUT_S = 3.0
#: a start that failed for its options or its memory will fail again
MAX_CONSTRUCTOR_RETRIES = 2

#: Serve runs user code and routers on the replica's own loop: half the processor time per token.
SERVE_ENVIRONMENT = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}

ROUTER = "deployments.router:LoadRouter"
SCALING_POLICY = "deployments.scaling:TokenWorkPolicy"
#: the autoscaler's numbers are means over so long; Serve has them reported every ten seconds
SCALING_AVERAGE_S = 15.0
ENGINE_BUILDER = "deployments.engine_seam:build_engine"


def build(args: AppArgs) -> Application:
    """The application of these options; the same options give the same application."""
    return build_with_engine(args, ENGINE_BUILDER)


def build_with_engine(args: AppArgs, engine_builder: str) -> Application:
    """`engine_builder` is the import path of an `EngineBuilder`."""
    config = args.to_engine_config()
    common: dict[str, Any] = {
        "max_ongoing_requests": MAX_ONGOING_REQUESTS,
        "health_check_period_s": HEALTH_CHECK_PERIOD_S,
        "health_check_timeout_s": HEALTH_CHECK_TIMEOUT_S,
        "graceful_shutdown_timeout_s": args.drain_timeout_s,
        "graceful_shutdown_wait_loop_s": min(0.5, args.drain_timeout_s or 0.5),
        "max_constructor_retry_count": MAX_CONSTRUCTOR_RETRIES,
    }
    worker = serve.deployment(
        name=WORKER_NAME,
        **_scaling(args),
        ray_actor_options=_actor_options(uses_gpu=_uses_gpu(args.device)),
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),  # type: ignore[arg-type]
        **common,
    )(WorkerReplica)
    ingress = serve.deployment(
        name=INGRESS_NAME,
        num_replicas=args.num_ingress,
        # A new one is up before an old one stops.
        max_surge_percent=100,
        ray_actor_options=_actor_options(uses_gpu=False),
        **common,
    )(serve.ingress()(Ingress))
    worker_settings = WorkerSettings(
        model_name=args.model_name,
        metrics_host=args.metrics_host,
        metrics_port=args.metrics_port,
        vllm_metric_names=args.vllm_metric_names,
        step_timeout_s=args.step_timeout_s,
        stop_timeout_s=args.drain_timeout_s,
        engine_builder=engine_builder,
        max_queued_tokens=args.max_queued_tokens,
        max_queued_requests=args.max_queued_requests,
        target_queue_s=args.target_queue_s,
    )
    ingress_settings = IngressSettings(
        model=args.model,
        revision=args.revision,
        trust_remote_code=args.trust_remote_code,
        model_name=args.model_name,
        chat_template=args.chat_template,
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        metrics_host=args.metrics_host,
        metrics_port=args.metrics_port,
        vllm_metric_names=args.vllm_metric_names,
        request_log=args.effective_request_log,
        timeouts=ClientTimeouts(
            args.accept_timeout_s, args.stall_timeout_s, args.step_timeout_s, args.effective_drain_grace_s
        ),
        max_n=args.max_n,
        most_urgent_priority=args.most_urgent_priority,
        tenant_header=args.tenant_header,
        keys=args.key_ring(),
        tenants=args.declared_tenants,
        cors_origins=args.cors_origins,
        max_open_requests=args.max_open_requests,
        request_timeout_s=args.request_timeout_s,
        keep_alive_s=args.keep_alive_s,
        otlp_endpoint=args.otlp_endpoint,
        enable_prefix_caching=args.enable_prefix_caching,
    )
    return ingress.bind(worker.bind(config, worker_settings), ingress_settings)


def _scaling(args: AppArgs) -> dict[str, Any]:
    """A number of workers, or the autoscaler that chooses it."""
    fewest, most = args.worker_bounds
    if fewest == most:
        return {"num_replicas": fewest}
    autoscaling = AutoscalingConfig(
        min_replicas=fewest,
        initial_replicas=args.num_first_workers,
        max_replicas=most,
        upscale_delay_s=args.scale_up_delay_s,
        downscale_delay_s=args.scale_down_delay_s,
        look_back_period_s=SCALING_AVERAGE_S,
        policy=AutoscalingPolicy(  # type: ignore[no-untyped-call]
            policy_function=SCALING_POLICY, policy_kwargs={"target_queue_s": args.target_queue_s}
        ),
    )
    return {"autoscaling_config": autoscaling}


def _actor_options(*, uses_gpu: bool) -> dict[str, Any]:
    options: dict[str, Any] = {
        "num_cpus": NUM_CPUS_PER_REPLICA,
        "runtime_env": {"env_vars": dict(SERVE_ENVIRONMENT)},
    }
    if uses_gpu:
        options["num_gpus"] = 1
    return options


def _uses_gpu(device: str) -> bool:
    """`auto` is a GPU where the cluster has one."""
    if device == "auto":
        return ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0  # type: ignore[no-untyped-call]
    return device == "cuda"


def __getattr__(name: str) -> Application:
    """`app` is built when it is asked for: importing this module must stay cheap."""
    if name == "app":
        return build(AppArgs())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
