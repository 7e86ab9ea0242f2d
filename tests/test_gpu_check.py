"""The check on one GPU: what it makes of parts that fail, and whether its own rows can fail. Its dry run, slow."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from kv_cache.tensor_pool import TensorPool
from tests.gpu import attention_rows, swap_rows
from tests.gpu.models import num_parameters, random_model
from tests.gpu.parts import MACHINE, PARTS, Bench, Case, Part
from tests.gpu.prefill_rows import num_operations
from tests.gpu.report import Outcome, Report, Row, Verdict
from tests.gpu.run_parts import run_parts
from tests.gpu.sizes import DRY_RUN, LLAMA_1B, LLAMA_8B, LLAMA_TINY, ON_GPU
from worker.attention import TorchSdpaBackend

ROOT = Path(__file__).parent.parent
#: what the machine of a GPU need not have
MISSING_PACKAGES = ("ray", "fastapi", "pydantic", "llguidance", "psutil", "prometheus_client", "pytest", "accelerate")
FACTS = {"read_bytes_per_s": 1e9, "flops_per_s": 1e9}


def run(monkeypatch: pytest.MonkeyPatch, cases: dict[str, list[Case]], total_budget_s: float = 20.0) -> list[Row]:
    """Rows of parts with these cases, each with half a second."""
    for name, own in cases.items():
        module = ModuleType(f"part_{name}")
        module.cases = lambda bench, own=own: own  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
    report = Report()
    run_parts(cases, {name: Part(f"part_{name}", 0.5) for name in cases}, DRY_RUN, report, total_budget_s)
    return report.rows


def fine() -> Outcome:
    return Outcome("fine")


def raises() -> Outcome:
    raise RuntimeError("of this\n row")


def verdicts(rows: list[Row]) -> list[tuple[str, str, Verdict]]:
    return [(row.part, row.case, row.verdict) for row in rows]


def test_a_case_that_raises_fails_its_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = run(monkeypatch, {"a": [Case("bad", raises), Case("good", fine)], "b": [Case("good", fine)]})
    assert verdicts(rows) == [
        ("a", "bad", Verdict.FAILED),
        ("a", "good", Verdict.OK),
        ("b", "good", Verdict.OK),
    ]
    assert rows[0].text == "RuntimeError: of this row"


@pytest.mark.parametrize(
    ("ends", "said"),
    [(lambda: time.sleep(60), "took longer"), (lambda: os._exit(7), "ended with code 7")],
    ids=["a part over its time", "a part whose process dies"],
)
def test_a_part_that_ends_early_keeps_its_rows_and_the_next_one_runs(
    ends: Callable[[], Outcome], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    began_s = time.monotonic()
    rows = run(monkeypatch, {"a": [Case("good", fine), Case("bad", ends)], "b": [Case("good", fine)]})
    assert verdicts(rows) == [("a", "good", Verdict.OK), ("a", "", Verdict.FAILED), ("b", "good", Verdict.OK)]
    assert said in rows[1].text
    assert time.monotonic() - began_s < 10


def test_parts_for_which_no_time_is_left_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = run(monkeypatch, {"a": [Case("good", fine)]}, total_budget_s=0.0)
    assert verdicts(rows) == [("a", "", Verdict.FAILED)]


def test_a_part_that_is_not_there_fails() -> None:
    report = Report()
    run_parts(["a"], {"a": Part("tests.gpu.no_such_part", 5.0)}, DRY_RUN, report, 5.0)
    assert verdicts(report.rows) == [("a", "", Verdict.FAILED)]
    assert "no_such_part" in report.rows[0].text
    assert report.has_failed


def test_without_a_device_nothing_else_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = run(monkeypatch, {MACHINE: [Case("device", raises)], "b": [Case("good", fine)]})
    assert verdicts(rows) == [(MACHINE, "device", Verdict.FAILED)]


def test_rows_stand_in_the_table_and_the_file_as_they_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    report = Report(file)
    assert report.has_failed  # nothing was checked
    for verdict in (Verdict.OK, Verdict.REFUSED, Verdict.LEFT_OUT):
        report.add(Row("part", "case", verdict, 1.0, "text", {"step_ms": 2.5}))
        assert json.loads(file.read_text().splitlines()[-1])["verdict"] == verdict
    assert not report.has_failed
    report.add(Row("part", "case", Verdict.FAILED, 1.0, "text"))
    assert report.has_failed
    report.close()
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 6  # a heading, the rows, the counts
    assert table[-1] == "1 ok, 1 FAILED, 1 refused, 1 left out in 4 s"


class WrongBackend(TorchSdpaBackend):
    """A little off."""

    def forward(self, layer: int, *arguments: torch.Tensor, **options: object) -> torch.Tensor:
        return super().forward(layer, *arguments, **options) * 1.001


class BlindBackend(TorchSdpaBackend):
    """Gives no number at all for one token."""

    def forward(self, layer: int, *arguments: torch.Tensor, **options: object) -> torch.Tensor:
        output = super().forward(layer, *arguments, **options)
        output[-1] = torch.nan
        return output


@pytest.mark.parametrize(
    ("backend", "verdict"),
    [(TorchSdpaBackend, Verdict.OK), (WrongBackend, Verdict.FAILED), (BlindBackend, Verdict.FAILED)],
)
def test_a_backend_that_is_a_little_off_fails_its_row(
    backend: type[TorchSdpaBackend], verdict: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_rows, "backend_class", lambda *_: backend)
    outcome = attention_rows.compare(Bench(DRY_RUN, FACTS), "torch_sdpa", torch.float32, 16)
    assert outcome.verdict is verdict, outcome.text
    assert outcome.figures["num_batches"] == 4  # with a window and without; softcapping is refused
    assert "softcap" in outcome.text


class ForgetfulPool(TensorPool):
    def swap(self, out_pairs: list, in_pairs: list, copy_pairs: list) -> None:
        super().swap(out_pairs, in_pairs[1:], copy_pairs)


def test_a_block_that_does_not_come_back_fails_the_swap_row(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(replace(DRY_RUN, swap_bytes=2**18, copy_bytes=2**16), FACTS)
    assert swap_rows.swap_rates(bench, 16).verdict is Verdict.OK
    monkeypatch.setattr(swap_rows, "TensorPool", ForgetfulPool)
    assert swap_rows.swap_rates(bench, 16).verdict is Verdict.FAILED


def test_the_weights_of_a_model_are_counted_as_they_are() -> None:
    model = random_model(LLAMA_TINY, torch.float32, "cpu", TorchSdpaBackend.features)
    sizes = {name: weight.numel() for name, weight in model._model.named_parameters() if "norm" not in name}
    embedding = sizes.pop("model.embed_tokens.weight")
    head = sizes.pop("lm_head.weight")
    assert num_parameters(LLAMA_TINY) == (sum(sizes.values()), head)
    assert embedding == head
    assert [round(sum(num_parameters(size)) / 1e9, 2) for size in (LLAMA_1B, LLAMA_8B)] == [1.24, 7.5]


def test_operations_of_a_chunk_are_those_of_its_products() -> None:
    layers, head = num_parameters(LLAMA_TINY)
    pairs = 5 + 6 + 7  # a chunk of three tokens, the last of which sees seven keys
    assert num_operations(LLAMA_TINY, 3, 7) == 2 * 3 * layers + 2 * head + 4 * 2 * 64 * pairs


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_on_a_machine_without_a_gpu_the_check_says_so_and_stops() -> None:
    report = Report()
    run_parts(PARTS, PARTS, ON_GPU, report, 60.0)
    [row] = report.rows
    assert row.part == MACHINE
    assert row.text.startswith("RuntimeError: PyTorch finds no CUDA device")
    assert report.has_failed


@pytest.mark.slow
def test_the_dry_run_passes_on_a_machine_with_nothing_but_torch_and_transformers(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\nfor name in {MISSING_PACKAGES!r}:\n    sys.modules[name] = None\n"
    )
    rows_file = tmp_path / "rows.jsonl"
    result = subprocess.run(
        ["tests/gpu/run.sh", "--dry-run", "--json", str(rows_file)],
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    rows = [json.loads(line) for line in rows_file.read_text().splitlines()]
    assert {row["part"] for row in rows} == set(PARTS)
    assert all(row["verdict"] in (Verdict.OK, Verdict.REFUSED, Verdict.LEFT_OUT) for row in rows)


@pytest.mark.parametrize("options", [["--dry"], ["--only", "nothing"], ["--dry-run", "--json", "no/such/folder/rows"]])
def test_options_that_are_not_meant_are_refused_before_anything_runs(options: list[str], tmp_path: Path) -> None:
    result = subprocess.run(
        [str(ROOT / "tests/gpu/run.sh"), *options],
        cwd=tmp_path,
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 2
    assert "tests/gpu/run.sh: error: " in result.stderr.splitlines()[-1]
    assert result.stdout == ""
