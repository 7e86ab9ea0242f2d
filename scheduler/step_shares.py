"""How the time of a step divides among its rows: what a row alone would have taken, and what the others added.

Owns an online estimate of steps' times. Knows no requests.
"""

from dataclasses import dataclass

from scheduler.records import StepRecord
from scheduler.step_estimate import MIN_STEPS_SEEN, StepLoad, StepTimeEstimate

_NOTHING = StepLoad(0, 0, 0)
_ONE_ANSWER = StepLoad(1, 0, 0)


@dataclass(slots=True)
class StepShares:
    """Of one step. The three numbers of a decode row sum to `step_us`: what the row alone takes, what prompts added,
    what other answers added. `answer_row_us`: what one more decode row adds. `chunk_own_us`: what each chunk alone
    takes, in the order of the record. `chunk_answers_us`: what all decode rows add to a chunk's step."""

    step_us: int
    decode_own_us: int
    decode_prompts_us: int
    decode_answers_us: int
    answer_row_us: int
    chunk_own_us: list[int]
    chunk_answers_us: int


class ShareEstimate:
    """Until enough steps were seen, shares are those of the tokens."""

    def __init__(self) -> None:
        self._estimate = StepTimeEstimate()

    def learn(self, record: StepRecord) -> None:
        duration_s = record.duration_s
        if duration_s is not None and duration_s > 0.0 and record.num_batched_tokens:
            self._estimate.learn(_load_of(record), record.num_prefill_tokens, duration_s)

    def shares(self, record: StepRecord, step_us: int) -> StepShares:
        num_decodes, chunks = record.num_decodes, record.prefill_chunks
        if self._estimate.num_steps < MIN_STEPS_SEEN:
            num_tokens = max(record.num_batched_tokens, 1)
            one_row = 1 / num_tokens
            answers = num_decodes / num_tokens
            prompts = record.num_prefill_tokens / num_tokens
            alone = [(chunk.end - chunk.start) / num_tokens for chunk in chunks]
            row_more = one_row
        else:
            predict_s = self._estimate.predict_s
            answers_only_s = predict_s(StepLoad(num_decodes, 0, 0), 0)
            all_s = max(predict_s(_load_of(record), record.num_prefill_tokens), answers_only_s, 1e-9)
            base_s, one_s = predict_s(_NOTHING, 0), predict_s(_ONE_ANSWER, 0)
            one_row = one_s / all_s
            row_more = (one_s - base_s) / all_s
            answers = (answers_only_s - base_s) / all_s
            # Steps without prompts are many and well known: prompts added no more than what is beyond such a one.
            beyond_s = max(step_us * 1e-6 - answers_only_s, 0.0)
            prompts = min((all_s - answers_only_s) / all_s, beyond_s * 1e6 / max(step_us, 1))
            alone = [predict_s(StepLoad(0, 0, chunk.start), chunk.end - chunk.start) / all_s for chunk in chunks]
        if num_decodes == 0:  # answers stand still while prompts run
            own_us, prompts_us = 0, step_us
        elif not chunks:
            own_us, prompts_us = (step_us if num_decodes == 1 else min(int(step_us * one_row), step_us)), 0
        else:
            own_us = min(int(step_us * one_row), step_us)
            prompts_us = step_us - own_us if num_decodes == 1 else min(int(step_us * prompts), step_us - own_us)
        is_alone = len(chunks) == 1 and num_decodes == 0
        return StepShares(
            step_us,
            own_us,
            prompts_us,
            step_us - own_us - prompts_us,
            int(step_us * row_more),
            [step_us if is_alone else min(int(step_us * share), step_us) for share in alone],
            int(step_us * answers),
        )


def _load_of(record: StepRecord) -> StepLoad:
    """Without what answers read: it would have to be looked for in every row, and grows with their number anyway."""
    chunks = record.prefill_chunks
    return StepLoad(record.num_decodes, 0, chunks[0].start if chunks else 0)
