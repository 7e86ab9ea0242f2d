"""Our Triton kernels compiled for Ampere and Hopper, without one: that they compile, and what they take of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_attention_tiles import SHARED_MEMORY_KIB

ROOT = Path(__file__).parent.parent
PLAIN = {"window": 0, "softcap": 0.0}


def compiled(tmp_path: Path, *asked: dict) -> list[dict]:
    # The default of a setting changes with Triton's next version, and it warns unless told.
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    del environment["TRITON_INTERPRET"]
    result = subprocess.run(
        [sys.executable, "-m", "tests.compile_attention"],
        cwd=ROOT,
        env=environment,
        input="\n".join(map(json.dumps, asked)),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.slow
def test_the_kernels_compile_for_ampere_and_hopper_and_fit_into_their_shared_memory(tmp_path: Path) -> None:
    asked = [
        {"capability": capability, "kernel": kernel, "head_size": head_size, "dtype": dtype, **PLAIN}
        for capability, kernel, head_size, dtype in (
            ((9, 0), "chunk", 128, "bf16"),
            ((9, 0), "single", 128, "bf16"),
            ((9, 0), "chunk", 256, "fp16"),
            ((9, 0), "single", 256, "fp32"),
            ((8, 0), "chunk", 128, "bf16"),
            ((8, 0), "single", 64, "fp16"),
            ((8, 6), "chunk", 256, "bf16"),
            ((9, 0), "combine", 80, "bf16"),
            ((9, 0), "store", 80, "bf16"),
        )
    ]
    asked.append({**asked[0], "head_size": 80, "window": 512, "softcap": 30.0})
    answers = compiled(tmp_path, *asked)
    assert len(answers) == len(asked)
    for answer in answers:
        assert answer["shared_memory_bytes"] <= SHARED_MEMORY_KIB[tuple(answer["capability"])] * 1024, answer
        if answer["kernel"] == "chunk":
            expected = "wgmma.mma_async" if answer["capability"] == [9, 0] else "mma.sync"
            assert answer[expected] > 0, f"no tensor cores: {answer}"
        if answer["kernel"] == "single" and answer["dtype"] != "fp32":
            assert answer["mma.sync"] > 0, f"no tensor cores: {answer}"
