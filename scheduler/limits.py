"""Limits of a step that may change while the scheduler runs, and what running groups may keep when they shrink.

Owns the checks of new limits. Knows neither queues nor blocks.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler.config import SchedulerConfig, SchedulerPolicy
from scheduler.sequence import SequenceGroup


@dataclass(frozen=True, slots=True)
class StepLimits:
    """As in `SchedulerConfig`, which holds those of the start."""

    max_num_batched_tokens: int
    max_num_seqs: int
    target_itl_ms: float = 0.0


class LimitError(ValueError):
    """A limit that cannot hold here. `option` is its name, as in `SchedulerConfig`."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(f"{option}: {message}")
        self.option = option


def limits_of(config: SchedulerConfig) -> StepLimits:
    return StepLimits(config.max_num_batched_tokens, config.max_num_seqs, config.target_itl_ms)


def check_limits(limits: StepLimits, start: SchedulerConfig) -> None:
    """Raises `LimitError` for what a scheduler that was made from `start` cannot work with: buffers and pools were
    allocated for the limits of the start, so that these are the most there can be."""
    for option in ("max_num_batched_tokens", "max_num_seqs"):
        value, allocated = getattr(limits, option), getattr(start, option)
        if not 1 <= value <= allocated:
            raise LimitError(option, f"must be from 1 to {allocated}, which was allocated at start, got {value}")
    if limits.max_num_seqs + start.min_prefill_tokens > limits.max_num_batched_tokens:
        raise LimitError(
            "max_num_batched_tokens",
            f"{limits.max_num_batched_tokens} is below max_num_seqs {limits.max_num_seqs} "
            f"+ min_prefill_tokens {start.min_prefill_tokens}",
        )
    is_whole = start.policy is SchedulerPolicy.DEFAULT
    if is_whole and limits.max_num_batched_tokens < start.max_model_len:
        raise LimitError(
            "max_num_batched_tokens",
            f"{limits.max_num_batched_tokens} is below max_model_len {start.max_model_len}, and scheduler_policy "
            "default runs prompts whole",
        )
    if not 0.0 <= limits.target_itl_ms < float("inf"):
        raise LimitError("target_itl_ms", f"must be 0 (off) or more, got {limits.target_itl_ms}")
    if limits.target_itl_ms and is_whole:
        raise LimitError("target_itl_ms", "scheduler_policy default runs prompts whole: use chunked_prefill")


class Allowance:
    """What groups that were taken in under higher limits keep: who runs goes on, and who waits can still come in.

    Costs nothing once the last of them has ended.
    """

    def __init__(self) -> None:
        self._wide: dict[str, int] = {}
        self._is_over = False

    def lower(self, limits: StepLimits, groups: Iterable[SequenceGroup]) -> None:
        """New limits hold from the next step on; `groups` are all that are unfinished."""
        self._wide = {
            group.request_id: len(group.sequences) for group in groups if len(group.sequences) > limits.max_num_seqs
        }
        self._is_over = True

    def forget(self, request_id: str) -> None:
        if self._wide:
            self._wide.pop(request_id, None)

    def of_step(self, limits: SchedulerConfig, running: Iterable[SequenceGroup]) -> tuple[int, int]:
        """The tokens and sequence slots of the next step."""
        if not self._is_over:
            return limits.max_num_batched_tokens, limits.max_num_seqs
        num_held = sum(group.num_seqs for group in running)
        least = max(num_held, *self._wide.values()) if self._wide else num_held
        self._is_over = least > limits.max_num_seqs
        return max(limits.max_num_batched_tokens, least), max(limits.max_num_seqs, least)
