"""PNG plots of results. matplotlib is loaded here, when a plot is drawn, and nowhere else."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from deployments.bench.driver import Run
from deployments.bench.slo import Slo
from deployments.bench.summary import Summary

_SIZE_INCHES = (9.0, 5.0)
_DOTS_PER_INCH = 110


def plot_latency_against_rate(summaries: Sequence[Summary], slo: Slo, path: Path) -> None:
    """Median first token and 99th percentile of inter-token times over the offered rate, a line for each target.

    Runs that were ended early have no honest latency and are left out.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_INCHES, dpi=_DOTS_PER_INCH, layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    targets = list(dict.fromkeys(summary.target for summary in summaries))
    for target in targets:
        runs = sorted(
            (s for s in summaries if s.target == target and s.abandoned is None), key=lambda s: s.offered_rate
        )
        ttfts = [(s.offered_rate, s.latencies.ttft.p50 * 1e3) for s in runs if s.latencies.ttft.p50 is not None]
        itls = [(s.offered_rate, s.latencies.itl.p99 * 1e3) for s in runs if s.latencies.itl.p99 is not None]
        upper.plot([rate for rate, _ in ttfts], [value for _, value in ttfts], marker="o", label=target)
        lower.plot([rate for rate, _ in itls], [value for _, value in itls], marker="o", label=target)
    for axes, title, limit_s in (
        (upper, "first token, median (ms)", slo.ttft_s),
        (lower, "inter-token, p99 (ms)", slo.itl_s),
    ):
        axes.set_ylabel(title)
        axes.set_yscale("log")
        axes.grid(visible=True, alpha=0.3)
        if limit_s is not None:
            axes.axhline(limit_s * 1e3, color="black", linestyle="--", linewidth=1.0)
    lower.set_xlabel("offered rate (requests/s)")
    upper.legend()
    figure.savefig(path)


def plot_inter_token_times(run: Run, threshold_s: float | None, path: Path) -> None:
    """Each inter-token time at the moment it ended; those over the threshold, the stalls, are marked."""
    from matplotlib.figure import Figure

    points = [
        (after - run.started_s, after - before)
        for answer in run.answers
        for before, after in pairwise(answer.delivery_times_s)
    ]
    limit_s = float("inf") if threshold_s is None else threshold_s
    level = [(at, gap) for at, gap in points if gap <= limit_s]
    stalls = [(at, gap) for at, gap in points if gap > limit_s]
    figure = Figure(figsize=_SIZE_INCHES, dpi=_DOTS_PER_INCH, layout="constrained")
    axes = figure.subplots()
    axes.scatter([at for at, _ in level], [gap * 1e3 for _, gap in level], s=4, label=f"{len(level)} inter-token times")
    axes.scatter(
        [at for at, _ in stalls],
        [gap * 1e3 for _, gap in stalls],
        s=28,
        marker="x",
        color="tab:red",
        label=f"{len(stalls)} stalls",
    )
    if threshold_s is not None:
        axes.axhline(threshold_s * 1e3, color="black", linestyle="--", linewidth=1.0)
    axes.set_yscale("symlog", linthresh=1.0)
    axes.set_ylim(bottom=0.0)
    axes.set_xlabel("time since the start (s)")
    axes.set_ylabel("inter-token time (ms)")
    axes.set_title(run.target)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path)
