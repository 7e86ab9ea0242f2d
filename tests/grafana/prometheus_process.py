"""A real Prometheus as a child process: it scrapes one address every second, evaluates our rules, and is asked."""

import contextlib
import math
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.debian_tools import program
from tests.server_process import free_port, wait_until

RULES = Path(__file__).resolve().parents[2] / "monitoring" / "prometheus"
_START_TIMEOUT_S = 30.0
_STEP_S = 2
_STOP_TIMEOUT_S = 10.0


class Prometheus:
    """`began_s`: when it was started, on the clock of the day."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.began_s = time.time()

    def ask(self, path: str, **parameters: Any) -> Any:
        response = httpx.get(f"{self._url}/api/v1/{path}", params=parameters, timeout=30)
        answer = response.json()
        assert answer["status"] == "success", f"{parameters}: {answer.get('error')}"
        return answer["data"]

    def is_ready(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self._url}/-/ready", timeout=5).status_code == 200
        return False

    def has_data(self, expr: str) -> bool:
        """Whether the expression had a number at any time since the start."""
        series = self.ask("query_range", query=expr, start=self.began_s, end=time.time(), step=_STEP_S)["result"]
        return any(math.isfinite(float(value)) for each in series for _, value in each["values"])

    def newest(self, expr: str) -> list[dict[str, Any]]:
        """Series of an instant query."""
        found: list[dict[str, Any]] = self.ask("query", query=expr)["result"]
        return found

    def rules(self) -> list[dict[str, Any]]:
        return [rule for group in self.ask("rules")["groups"] for rule in group["rules"]]


@contextlib.contextmanager
def prometheus(folder: Path, target: str) -> Iterator[Prometheus]:
    """Ready, and at an end with the block. `target` is host:port. Skips the test where Prometheus is not installed."""
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": f"{_STEP_S}s"},
        "rule_files": [str(RULES / "recording-rules.yml"), str(RULES / "alert-rules.yml")],
        "scrape_configs": [{"job_name": "stallfree", "static_configs": [{"targets": [target]}]}],
    }
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [
                program("prometheus"),
                f"--config.file={path}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
                "--log.level=warn",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        asked = Prometheus(f"http://{address}")
        wait_until(asked.is_ready, _START_TIMEOUT_S)
        yield asked
    finally:
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
