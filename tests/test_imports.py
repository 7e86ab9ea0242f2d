"""The import table: who may import what, wherever in a file the import stands, and what a bare import loads."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

PACKAGES = ("kv_cache", "scheduler", "worker", "monitoring", "deployments")

#: What each package may import beside the standard library and itself. `deployments` may import everything.
ALLOWED = {
    "kv_cache": set(),
    "scheduler": {"kv_cache"},
    "worker": {
        *("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "accelerate", "gguf"),
        *("jinja2", "llguidance", "numpy", "tqdm", "psutil", "scheduler", "kv_cache"),
    },
    "monitoring": {"prometheus_client", "scheduler.records"},
}

#: What one file may import beyond its package's rule.
ALLOWED_IN_FILE = {
    "kv_cache/tensor_pool.py": {"torch"},
    "monitoring/metrics_actor.py": {"ray"},
    "worker/attention/flash_attn.py": {"flash_attn"},
    "worker/attention/flash_rows.py": {"triton"},
    "worker/attention/triton_kernel.py": {"triton"},
    "worker/attention/triton_paged.py": {"triton"},
}


def imported_modules(source: str) -> list[str]:
    """Every absolute import of a file, at its top or inside a function, by statement or by a literal name."""
    modules: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            # `from scheduler import records` imports scheduler.records or a name; the longer path is the finding
            modules.extend(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                modules.append(node.args[0].value)
    return modules


def is_within(module: str, allowed: str) -> bool:
    return module == allowed or module.startswith(f"{allowed}.")


def offences(path: str, source: str) -> list[str]:
    package = path.split("/", 1)[0]
    if package == "deployments":
        return []
    allowed = ALLOWED[package] | ALLOWED_IN_FILE.get(path, set()) | {package}
    return [
        module
        for module in imported_modules(source)
        if module.split(".", 1)[0] not in sys.stdlib_module_names
        and not any(is_within(module, name) for name in allowed)
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_imports_only_what_the_table_allows(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files, f"{package} has no files"
    found = {
        path: bad for file in files if (bad := offences(path := file.relative_to(ROOT).as_posix(), file.read_text()))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("path", "source", "offence"),
    [
        ("scheduler/a.py", "import torch", "torch"),
        ("scheduler/a.py", "def f():\n    from numpy import array", "numpy.array"),
        ("scheduler/a.py", "import kv_cache, worker.types", "worker.types"),
        ("kv_cache/block_manager.py", "import torch", "torch"),
        ("kv_cache/a.py", "from scheduler.records import StepRecord", "scheduler.records.StepRecord"),
        ("worker/a.py", "import importlib\nimportlib.import_module('ray.serve')", "ray.serve"),
        ("worker/a.py", "if True:\n    from monitoring import table", "monitoring.table"),
        ("monitoring/a.py", "from scheduler import Scheduler", "scheduler.Scheduler"),
        ("monitoring/table.py", "import ray", "ray"),
        ("monitoring/a.py", "from worker.types import EngineLoad", "worker.types.EngineLoad"),
    ],
)
def test_an_import_against_the_table_is_found(path: str, source: str, offence: str) -> None:
    assert offences(path, source) == [offence]


def test_imports_by_the_table_are_no_offence() -> None:
    assert offences("kv_cache/tensor_pool.py", "import torch") == []
    assert offences("monitoring/a.py", "from scheduler.records import StepRecord\nimport json") == []
    assert offences("worker/a.py", "from .noise import gumbel\nimport torch.nn") == []


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        ("scheduler, kv_cache", "torch numpy ray transformers pydantic matplotlib"),
        ("monitoring.worker_metrics, monitoring.ingress_metrics", "torch numpy ray transformers pydantic"),
        ("monitoring.metrics_actor", "torch transformers"),
        ("deployments, deployments.router", "torch transformers"),
    ],
)
def test_a_bare_import_loads_nothing_heavy(modules: str, unwanted: str) -> None:
    program = f"import sys\nimport {modules}\nprint(*sorted(set({unwanted.split()!r}) & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert (result.returncode, result.stdout.strip()) == (0, ""), result.stderr
