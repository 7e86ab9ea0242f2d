"""The comparison through HTTP as a Markdown table and as lines about its goals. Measures nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.http_rows import Figure, Goal, Row
from benchmarks.peers.drivers import OURS
from deployments.bench.comparison import Compared

#: the lines of a document between which the table stands
BEGIN, END = "<!-- benchmarks.http -->", "<!-- end of benchmarks.http -->"


@dataclass(slots=True)
class Measured:
    """A row: a column for each server that was measured, ours first if it is among them, and why others were not."""

    row: Row
    columns: list[Compared] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def has_figures(self) -> bool:
        """Of a server whose requests all failed there are none, or zeros."""
        return any(column.medians[figure.quantity] for column in self.columns for figure in self.row.figures)

    def column(self, name: str) -> Compared | None:
        return next((column for column in self.columns if column.target == name), None)

    def ratio(self, name: str, quantity: str) -> float | None:
        """Theirs over ours; None without a figure of either."""
        column = self.column(name)
        return None if column is None or self.columns[0].target != OURS else column.ratios[quantity]

    def to_dicts(self) -> list[dict[str, Any]]:
        found = [{"row": self.row.name, **column.to_dict()} for column in self.columns]
        return found + [{"row": self.row.name, "target": name, "error": why} for name, why in self.failures.items()]


def table(rows: Sequence[Measured], names: Sequence[str]) -> str:
    """A line for each figure, a column for each server; in brackets theirs over ours."""
    shown = [name for name in names if any(measured.column(name) is not None for measured in rows)]
    lines = [["", *shown, "best"]]
    for measured in rows:
        for figure in measured.row.figures:
            lines.append([figure.title, *(_cell(figure, measured, name) for name in shown), _best(figure, measured)])
    widths = [max(len(line[place]) for line in lines) for place in range(len(lines[0]))]
    texts = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([texts[0], rule, *texts[1:]])


def _cell(figure: Figure, measured: Measured, name: str) -> str:
    column = measured.column(name)
    value = None if column is None else column.medians[figure.quantity]
    if column is None or value is None:
        return "-"
    ratio = measured.ratio(name, figure.quantity)
    unit = " ms" if figure.is_time else ""
    shown = f"{value * 1e3 if figure.is_time else value:,.0f}{unit}"
    against = "" if name == OURS or ratio is None else f" ({ratio:.2f}x)"
    failed = f", {column.num_failed} failed" if column.num_failed else ""
    return shown + against + failed


def _best(figure: Figure, measured: Measured) -> str:
    values = {
        column.target: value for column in measured.columns if (value := column.medians[figure.quantity]) is not None
    }
    choose = min if figure.less_is_better else max
    return choose(values, key=values.__getitem__) if values else "-"


def goal_lines(rows: Sequence[Measured], goals: Sequence[Goal]) -> list[str]:
    """Each goal with what was measured; a ratio is the median of the ratios of the rounds."""
    lines = []
    for goal in goals:
        measured = next((one for one in rows if one.row.name == goal.row), None)
        if measured is None:
            continue
        figure = next(figure for figure in measured.row.figures if figure.quantity == goal.quantity)
        # What is kept are theirs over ours.
        inverse = measured.ratio(goal.other, goal.quantity)
        if inverse is None or inverse <= 0:
            lines.append(f"not measured: {figure.title}, {goal.describe()}")
            continue
        ratio = 1.0 / inverse
        verdict = "kept" if goal.holds(ratio) else "MISSED"
        lines.append(f"{verdict}: {figure.title}, {goal.describe()}: {ratio:.2f} x")
    return lines
