"""The main table: what each benchmark's JSON line becomes, and that nothing is shown that was not printed."""

from pathlib import Path

import pytest

from benchmarks.__main__ import (
    BEGIN,
    END,
    Part,
    engine_rows,
    gap_rows,
    lines_of,
    python_rows,
    record_rows,
    scheduler_rows,
    table,
)
from benchmarks.documents import with_table


def test_a_decode_row_shows_its_step_and_how_far_that_is_from_memory() -> None:
    line = {"row": "decode_b8", "tokens_per_s": 610.4, "step_ms": 11.65, "bound_ms": 6.21, "ratio": 1.876}
    assert engine_rows(line) == [
        ("`decode_b8`", "610 tokens/s, 11.65 ms a decode step", "1.88 x the 6.21 ms of reading from memory")
    ]
    assert engine_rows({"row": "prefill_2048", "tokens_per_s": 2841.0}) == [
        ("`prefill_2048`", "2,841 tokens/s", "")
    ]


def test_the_worst_gap_stands_beside_the_other_policys() -> None:
    policies = {"chunked_prefill": {"worst_gap_ms": 150.0}, "default": {"worst_gap_ms": 3000.0}}
    line = {"num_answers": 8, "num_prompt_tokens": 4096, "policies": policies}
    (cells,) = gap_rows(line)
    assert cells[1:] == ("150 ms", "`default`: 3,000 ms, 20.0 x")


def test_costs_of_the_scheduler_are_shown_for_one_answer_and_for_a_step() -> None:
    line = {"running": 256, "waiting": 10_000, "us_per_sequence": 1.5, "queue_policy": "fcfs"}
    assert scheduler_rows(line) == [
        ("scheduler, 256 running, 10,000 waiting (fcfs)", "1.50 µs for each of them", "0.38 ms a step")
    ]
    assert scheduler_rows({**line, "queue_policy": "fair"}) == scheduler_rows({**line, "waiting": 10}) == []
    assert record_rows({"running": 256, "record_us": 30.2, "explain_us": 210.0, "step_ms": 120.0, "share": 0.002}) == [
        ("step records and what `explain` keeps, 256 running", "240 µs a step", "0.20% of the decode step of 120 ms")
    ]
    assert python_rows({"running": 32, "python_ms": 0.504, "python_p90_ms": 0.61, "steps": 60}) == [
        ("Python per step, 32 running", "0.50 ms", "90 of 100 steps within 0.61 ms")
    ]


def test_the_table_is_markdown_with_a_rule_under_its_first_row() -> None:
    lines = table([("a", "b", "c"), ("longer", "2", "")]).splitlines()
    assert lines[0] == "| a      | b | c |"
    assert lines[1] == "|--------|---|---|"
    assert len({len(line) for line in lines}) == 1


def test_only_json_lines_of_a_benchmark_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "printing.py").write_text('print("loading")\nprint(\'{"row": "x", "tokens_per_s": 1.0}\')\n')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert lines_of(Part("printing", (), engine_rows)) == [{"row": "x", "tokens_per_s": 1.0}]


def test_the_readme_has_a_place_for_the_table_and_only_that_changes() -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    changed = with_table(readme, "| new |", BEGIN, END)
    assert "| new |" in changed
    assert with_table(changed, "| newer |", BEGIN, END) == changed.replace("| new |", "| newer |")
    assert changed.partition("<!--")[0] == readme.partition("<!--")[0]
    with pytest.raises(ValueError, match="make bench"):
        with_table("no marks", "| new |", BEGIN, END)
