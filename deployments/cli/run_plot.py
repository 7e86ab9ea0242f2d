"""Draws a run: how long tokens took, and what the queues and the cache did. The only place that knows matplotlib."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from deployments.cli.options import UsageError
from scheduler.run_report import RunReport
from scheduler.timeline import Timeline

_SIZE_INCHES = (12.0, 8.0)


def check_can_plot(path: str) -> None:
    """Before anything is run. Raises UsageError."""
    if find_spec("matplotlib") is None:
        raise UsageError("--plot", "matplotlib is not installed: pip install 'stallfree[plot]'")
    if not path.endswith(".png"):
        raise UsageError("--plot", f"writes PNG: the name must end in .png, got {path!r}")
    if not Path(path).parent.is_dir():
        raise UsageError("--plot", f"there is no folder {Path(path).parent}")


def plot_run(path: str, report: RunReport, timeline: Timeline, *, title: str) -> None:
    """Writes the PNG: shares of first tokens and gaps by their duration, requests and blocks over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    figure.suptitle(title)
    (latency, gaps), (queues, blocks) = figure.subplots(2, 2)
    for axes, values, label in (
        (latency, report.ttft_s, "first token"),
        (latency, report.end_to_end_s, "end to end"),
        (gaps, report.inter_token_s, "inter-token"),
    ):
        if values:
            ordered = sorted(values)
            axes.plot(ordered, _shares(ordered), label=label)
    for axes in (latency, gaps):
        axes.set_xlabel("seconds")
        axes.set_ylabel("share at most so long")
        axes.grid(visible=True, alpha=0.3)
        if axes.lines:
            axes.set_xscale("log")
            axes.legend()
    times = [point[0] for point in timeline.points]
    for place, label in ((1, "running"), (2, "waiting"), (3, "swapped")):
        queues.step(times, [point[place] for point in timeline.points], where="post", label=label)
    queues.set_ylabel("requests")
    queues.legend()
    blocks.step(times, [point[4] for point in timeline.points], where="post")
    blocks.set_ylabel("device blocks held")
    for axes in (queues, blocks):
        axes.set_xlabel("simulated seconds")
        axes.grid(visible=True, alpha=0.3)
    figure.savefig(path, dpi=100)


def _shares(ordered: Sequence[float]) -> list[float]:
    return [(place + 1) / len(ordered) for place in range(len(ordered))]
