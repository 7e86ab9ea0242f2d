"""A bar about a run that is going on, for `deployments.cli.progress.ProgressLine`."""

from collections.abc import Sequence

from deployments.bench.requests import Answer

_BAR_CHARS = 24


def bar(label: str, answers: Sequence[Answer], elapsed_s: float) -> str:
    """`elapsed_s` counts from the start of the whole benchmark."""
    num_sent = sum(answer.sent_s is not None for answer in answers)
    num_failed = sum(answer.error is not None for answer in answers)
    num_ended = sum(answer.ended_s is not None for answer in answers)
    num_deliveries = sum(len(answer.delivery_times_s) for answer in answers)
    filled = _BAR_CHARS * num_ended // max(1, len(answers))
    return (
        f"[{'#' * filled}{'.' * (_BAR_CHARS - filled)}] {num_ended}/{len(answers)} {label}: "
        f"{num_sent - num_ended} open, {num_failed} failed, {num_deliveries} deliveries, {elapsed_s:.0f} s"
    )
