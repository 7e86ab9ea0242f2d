"""Ray Serve LLM on a model folder: `python ray_llm_server.py MODEL_FOLDER HOST PORT`. Runs in its own environment.

Until SIGTERM or Ctrl-C.
"""

import os
import signal
import sys
import threading


def main() -> None:
    import ray
    from ray import serve
    from ray.serve.llm import LLMConfig, build_openai_app

    folder, host, port = sys.argv[1:]
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    num_cpus = len(os.sched_getaffinity(0))
    # Its replicas and the placement group of its engine ask for whole cores, of which a small machine has too few.
    ray.init(address="local", include_dashboard=False, num_cpus=4 * num_cpus + 4)
    names = ("VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS", "OMP_WAIT_POLICY")
    config = LLMConfig(
        model_loading_config={"model_id": "demo", "model_source": folder},
        accelerator_config={"kind": "cpu"},
        engine_kwargs={"dtype": "bfloat16"},
        deployment_config={"autoscaling_config": {"min_replicas": 1, "max_replicas": 1}},
        runtime_env={"env_vars": {name: os.environ[name] for name in names if name in os.environ}},
    )
    serve.start(http_options={"host": host, "port": int(port)}, proxy_location="HeadOnly")
    serve.run(build_openai_app({"llm_configs": [config]}))
    over.wait()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
