"""Runs side by side as a table for people. Knows the fields of `RunReport`, not where they come from."""

from collections.abc import Callable, Mapping
from typing import Any

_Report = Mapping[str, Any]


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1000:,.1f} ms" if value < 1.0 else f"{value:,.2f} s"


def _percentiles(name: str) -> Callable[[_Report], str]:
    return lambda report: " / ".join(_seconds(report[name][key]) for key in ("p50", "p90", "p99"))


_ROWS: tuple[tuple[str, Callable[[_Report], str]], ...] = (
    ("requests", lambda r: f"{r['num_requests']:,}"),
    ("  finished", lambda r: f"{r['num_finished']:,}"),
    ("  cancelled", lambda r: f"{r['num_cancelled']:,}"),
    ("  refused or failed", lambda r: f"{r['num_refused'] + r['num_failed']:,}"),
    ("duration", lambda r: _seconds(r["run_s"])),
    ("steps", lambda r: f"{r['num_steps']:,}"),
    ("output tokens a second", lambda r: f"{r['output_tokens_per_s']:,.1f}"),
    ("first token p50/p90/p99", _percentiles("ttft_s")),
    ("inter-token p50/p90/p99", _percentiles("inter_token_s")),
    ("end to end p50/p90/p99", _percentiles("end_to_end_s")),
    ("preempted: recompute, swap", lambda r: f"{r['preemptions']['recompute']:,}, {r['preemptions']['swap']:,}"),
    ("  most of one request", lambda r: f"{r['max_num_preemptions_of_a_request']:,}"),
    ("most blocks held", lambda r: f"{r['max_num_device_blocks_used']:,}"),
    (
        "prefix cache hits",
        lambda r: f"{r['cache']['hit_share']:.1%} of {r['cache']['num_queried_blocks']:,} blocks",
    ),
)


def run_table(reports: Mapping[str, _Report]) -> str:
    """One column for each run, by its title."""
    lines = [["", *reports]]
    lines += [[title, *(show(report) for report in reports.values())] for title, show in _ROWS]
    for reason in sorted({reason for report in reports.values() for reason in report["blocked_request_s"]}):
        blocked = [_seconds(report["blocked_request_s"].get(reason, 0.0)) for report in reports.values()]
        lines.append([f"waited: {reason}", *blocked])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
