"""Five hundred streams through four ingress replicas and two workers: none fails, and no token is lost."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.paced import paced_args, paced_environment
from tests.chaos.server import chaos_server
from tests.server_process import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.ray]

NUM_STREAMS = 500
NUM_TOKENS = 64
#: slow enough that all of them have begun before the first one ends
STEP_MS = 250
CLIENT_TIMEOUT_S = 150


def test_five_hundred_streams_lose_nothing(paced_folder: Path):
    args = paced_args(paced_folder, 2, num_ingress=4, max_num_seqs=256, max_num_batched_tokens=512)
    with chaos_server(args, paced_environment(step_ms=STEP_MS)) as server:
        wait_until(lambda: len(server.ingress_pids()) == 4, 60.0)
        command = [sys.executable, "-m", "tests.chaos.many_streams", server.url, str(paced_folder)]
        command += [str(NUM_STREAMS), str(NUM_TOKENS)]
        client = subprocess.run(command, capture_output=True, text=True, timeout=CLIENT_TIMEOUT_S, check=False)
        assert client.returncode == 0, client.stderr
        report = json.loads(client.stdout)
        print(report)
        assert report["faults"] == []
        assert report["most_open"] >= 0.9 * NUM_STREAMS
        wait_until(server.is_idle, 20.0)
