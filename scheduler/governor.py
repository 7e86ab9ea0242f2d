"""The governor: how many prompt tokens a step may take without making running answers wait too long.

Owns the margin that it keeps for noise. Wrong numbers cannot stop a prompt: it always gets `min_prefill_tokens`, or
one token; and never more than the budget.
"""

from collections.abc import Iterable

from scheduler.sequence import SequenceGroup
from scheduler.step import Step
from scheduler.step_estimate import MIN_STEPS_SEEN, StepLoad, StepTimeEstimate

#: the share of steps that may take longer than the target
TOLERATED_SHARE = 0.01
#: how fast the margin moves towards that share, in units of the foreseen time
MARGIN_STEP = 0.1
FIRST_MARGIN = 1.2
MAX_MARGIN = 3.0


class BudgetGovernor:
    """Chooses prompt tokens so that all but `TOLERATED_SHARE` of the steps with running answers meet the target."""

    def __init__(self, target_s: float, alignment: int, min_prefill_tokens: int) -> None:
        self._target_s = target_s
        self._alignment = alignment
        self._min_prefill_tokens = max(min_prefill_tokens, 1)
        self._estimate = StepTimeEstimate()
        #: what a step may take, as a multiple of what is foreseen
        self.margin = FIRST_MARGIN

    def set_target(self, target_s: float, alignment: int) -> None:
        """What was learnt of steps' times stays."""
        self._target_s = target_s
        self._alignment = alignment

    def budget(self, running: Iterable[SequenceGroup], max_num_batched_tokens: int) -> int:
        """The token budget of the next step: its decodes and the prompt tokens that the target allows beside them."""
        load = _next_load(running)
        left = max(max_num_batched_tokens - load.num_decodes, 0)
        return min(load.num_decodes + self.max_prefill_tokens(load, left), max_num_batched_tokens)

    def max_prefill_tokens(self, load: StepLoad, num_budget_tokens: int) -> int:
        """The most prompt tokens, aligned, whose step meets the target; all of the budget if nobody is running."""
        if load.num_decodes == 0:
            return num_budget_tokens
        least = min(self._min_prefill_tokens, num_budget_tokens)
        if self._estimate.num_steps < MIN_STEPS_SEEN:
            return max(least, min(self._alignment, num_budget_tokens))
        low, high = 0, num_budget_tokens
        while low < high:
            middle = (low + high + 1) // 2
            if self.margin * self._estimate.predict_s(load, middle) <= self._target_s:
                low = middle
            else:
                high = middle - 1
        if low < num_budget_tokens:
            low -= low % self._alignment
        return max(low, least)

    def settle(self, step: Step, duration_s: float) -> None:
        """A step has ended: learn from it, and say in its record whether running answers waited too long."""
        load = _load_of(step)
        record = step.record
        if load.num_decodes:
            record.is_over_target = duration_s > self._target_s
        self.learn(load, record.num_prefill_tokens, duration_s)
        record.governor_margin = self.margin

    def learn(self, load: StepLoad, num_prefill_tokens: int, duration_s: float) -> None:
        """Steps with running answers move the margin, too: up a step where it was exceeded, else down a little, so
        that it settles where the tolerated share exceeds it."""
        foreseen_s = self._estimate.predict_s(load, num_prefill_tokens)
        if load.num_decodes and self._estimate.num_steps >= MIN_STEPS_SEEN and foreseen_s > 0.0:
            exceeded = 1.0 if duration_s > self.margin * foreseen_s else 0.0
            self.margin = min(max(self.margin + MARGIN_STEP * (exceeded - TOLERATED_SHARE), 1.0), MAX_MARGIN)
        self._estimate.learn(load, num_prefill_tokens, duration_s)


def _next_load(running: Iterable[SequenceGroup]) -> StepLoad:
    num_decodes = num_context_tokens = 0
    num_prompt_context_tokens: int | None = None
    for group in running:
        if group.is_prefilling:
            if num_prompt_context_tokens is None:
                num_prompt_context_tokens = group.live[0].num_scheduled_tokens
        else:
            num_decodes += len(group.live)
            num_context_tokens += sum(seq.num_scheduled_tokens + 1 for seq in group.live)
    return StepLoad(num_decodes, num_context_tokens, num_prompt_context_tokens or 0)


def _load_of(step: Step) -> StepLoad:
    num_decodes = num_context_tokens = 0
    num_prompt_context_tokens: int | None = None
    for chunk in step.outputs.chunks:
        if not chunk.is_prefill:
            num_decodes += 1
            num_context_tokens += chunk.start + 1
        elif num_prompt_context_tokens is None:
            num_prompt_context_tokens = chunk.start
    return StepLoad(num_decodes, num_context_tokens, num_prompt_context_tokens or 0)
