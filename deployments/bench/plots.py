"""Plots of results, as PNG. matplotlib is loaded when a figure is made, and nowhere else."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from deployments.bench.driver import Run
from deployments.bench.slo import Slo
from deployments.bench.summary import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIZE_INCHES = (9.0, 5.0)
_DOTS_PER_INCH = 110
#: tokens that arrive together have no time between them, which a logarithmic axis cannot show
_SMALLEST_SHOWN_MS = 0.1


def save(figure: "Figure", path: Path) -> None:
    figure.savefig(path, format="png")


def latency_against_rate(summaries: Sequence[Summary], slo: Slo) -> "Figure":
    """Median first token and 99th percentile of inter-token times over the offered rate, a line for each target.

    Runs that were ended early have no honest latency and are left out.
    """
    figure = _new_figure()
    upper, lower = figure.subplots(2, 1, sharex=True)
    for target in dict.fromkeys(summary.target for summary in summaries):
        whole = [s for s in summaries if s.target == target and s.abandoned is None]
        whole.sort(key=lambda summary: summary.offered_rate)
        _line(upper, target, [(s.offered_rate, s.latencies.ttft.p50) for s in whole])
        _line(lower, target, [(s.offered_rate, s.latencies.itl.p99) for s in whole])
    _dress(upper, "first token, median (ms)", slo.ttft_s)
    _dress(lower, "inter-token, p99 (ms)", slo.itl_s)
    lower.set_xlabel("offered rate (requests/s)")
    upper.legend()
    return figure


def inter_token_times(run: Run, threshold_s: float | None) -> "Figure":
    """Each inter-token time at the moment it ended; those over the threshold, the stalls, are marked."""
    figure = _new_figure()
    axes = figure.subplots()
    level: list[tuple[float, float]] = []
    stalls: list[tuple[float, float]] = []
    for answer in run.answers:
        for before, after in pairwise(answer.delivery_times_s):
            is_stall = threshold_s is not None and after - before > threshold_s
            point = (after - run.started_s, max((after - before) * 1e3, _SMALLEST_SHOWN_MS))
            (stalls if is_stall else level).append(point)
    axes.scatter([at for at, _ in level], [ms for _, ms in level], s=4, label=f"{len(level)} level")
    axes.scatter(
        [at for at, _ in stalls],
        [ms for _, ms in stalls],
        s=28,
        marker="x",
        color="tab:red",
        label=f"{len(stalls)} stalls",
    )
    _dress(axes, "inter-token time (ms)", threshold_s)
    axes.set_xlabel("time since the start (s)")
    axes.set_title(run.target)
    axes.legend()
    return figure


def _new_figure() -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=_SIZE_INCHES, dpi=_DOTS_PER_INCH, layout="constrained")


def _line(axes: "Axes", label: str, points: Sequence[tuple[float, float | None]]) -> None:
    known = [(rate, value_s * 1e3) for rate, value_s in points if value_s is not None]
    axes.plot([rate for rate, _ in known], [ms for _, ms in known], marker="o", label=label)


def _dress(axes: "Axes", title: str, limit_s: float | None) -> None:
    axes.set_ylabel(title)
    axes.set_yscale("log")
    axes.grid(visible=True, alpha=0.3)
    if limit_s is not None:
        axes.axhline(limit_s * 1e3, color="black", linestyle="--", linewidth=1.0)
