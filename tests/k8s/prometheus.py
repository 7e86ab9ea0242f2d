"""A real Prometheus beside a test: configurations that it checks, and queries to one that runs. Knows no manifests."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.debian_tools import program
from tests.server_process import free_port, wait_until

START_TIMEOUT_S = 30.0
CHECK_TIMEOUT_S = 60.0


def check(kind: str, path: Path) -> str:
    """What promtool says against a `config` or against `rules`; empty if nothing."""
    ended = subprocess.run(
        [program("promtool"), "check", kind, str(path)],
        capture_output=True,
        text=True,
        timeout=CHECK_TIMEOUT_S,
        check=False,
    )
    return "" if ended.returncode == 0 else ended.stdout + ended.stderr


def write_config(folder: Path, scrape_configs: list[dict[str, Any]], rules: dict[str, dict[str, Any]]) -> Path:
    """A whole configuration with its rule files beside it: their contents by name."""
    for name, content in rules.items():
        (folder / f"{name}.rules.yml").write_text(yaml.safe_dump(content))
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump({"rule_files": ["*.rules.yml"], "scrape_configs": scrape_configs}))
    return path


@dataclass(frozen=True)
class Prometheus:
    url: str

    def query(self, expression: str) -> list[dict[str, str]]:
        """The labels of what it finds now."""
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": expression}, timeout=10)
        return [sample["metric"] for sample in answer.json()["data"]["result"]]


@contextmanager
def running(config: Path) -> Iterator[Prometheus]:
    url = f"127.0.0.1:{free_port()}"
    command = [program("prometheus"), f"--config.file={config}", f"--web.listen-address={url}"]
    command.append(f"--storage.tsdb.path={config.parent / 'series'}")
    with (config.parent / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_until(lambda: _is_ready(url), START_TIMEOUT_S)
        yield Prometheus(f"http://{url}")
    finally:
        process.terminate()
        process.wait(START_TIMEOUT_S)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"http://{url}/-/ready").status_code == 200
    except httpx.TransportError:
        return False


def over(scrape_config: dict[str, Any], target: str, found: list[dict[str, str]]) -> dict[str, Any]:
    """The same over one target that was discovered once with each of those labels, as often as a test can wait for."""
    discovered = [{"targets": [target], "labels": labels} for labels in found]
    return {**scrape_config, "scrape_interval": "1s", "scrape_timeout": "1s", "static_configs": discovered}
