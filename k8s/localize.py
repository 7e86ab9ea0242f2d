"""Cuts a Serve document of this folder down to one machine without a GPU, to try it there before a cluster has it.

    python -m k8s.localize k8s/overlays/gpu/serve.yaml > serve.yaml && serve deploy serve.yaml

Everything that is not in the patch stays as it is: what is deployed is that document. The patch changes the address,
the model, the device and numbers; keys are dropped unless a file is named. Knows no cluster.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

EXIT_USAGE = 2
#: what a machine with two cores and no GPU carries; options that a document does not set are not added
SMALLER: dict[str, Any] = {
    "device": "cpu",
    "min_workers": 1,
    "max_workers": 2,
    "max_model_len": 512,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 8,
    "kv_cache_memory": "64MiB",
    "metrics_host": "127.0.0.1",
}


def localized(
    document: dict[str, Any], *, model: str, port: int, metrics_port: int, api_key_file: str | None = None
) -> dict[str, Any]:
    """A copy of the document that runs on this machine."""
    local = {
        **document,
        # One machine has one proxy, and only the machine itself asks it.
        "proxy_location": "HeadOnly",
        "http_options": {**document.get("http_options", {}), "host": "127.0.0.1", "port": port},
    }
    local["applications"] = [
        {
            **application,
            "args": _local_args(application["args"], model, metrics_port, api_key_file),
            "deployments": [_local_deployment(deployment) for deployment in application.get("deployments", ())],
        }
        for application in document["applications"]
    ]
    return local


def read_document(path: Path) -> dict[str, Any]:
    """Raises ValueError if it cannot be read, or is no document of Serve's."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {error}") from error
    applications = document.get("applications") if isinstance(document, dict) else None
    if not isinstance(applications, list) or not all(
        isinstance(application, dict) and isinstance(application.get("args"), dict) for application in applications
    ):
        raise ValueError(f"{path} has no list `applications`, each with its `args`")
    return document


def _local_deployment(deployment: dict[str, Any]) -> dict[str, Any]:
    return {**deployment, "num_replicas": 1} if "num_replicas" in deployment else deployment


def _local_args(args: dict[str, Any], model: str, metrics_port: int, api_key_file: str | None) -> dict[str, Any]:
    local = {name: SMALLER.get(name, value) for name, value in args.items() if name != "api_key_file"}
    if "api_key_file" in args and api_key_file is not None:
        local["api_key_file"] = api_key_file
    return {**local, "model": model, "metrics_port": metrics_port, "num_threads": 1}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m k8s.localize", description=__doc__)
    parser.add_argument("document", type=Path)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--metrics-port", type=int, default=9400)
    parser.add_argument("--api-key-file")
    options = parser.parse_args()
    try:
        local = localized(
            read_document(options.document),
            model=options.model,
            port=options.port,
            metrics_port=options.metrics_port,
            api_key_file=options.api_key_file,
        )
    except ValueError as error:
        print(f"{parser.prog}: error: document: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_USAGE
    yaml.safe_dump(local, sys.stdout, sort_keys=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
