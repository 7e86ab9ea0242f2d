"""The margin rule: which differences between two runs rounding alone may excuse, and how many of them.

Knows token ids and margins, neither models nor engines.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.oracle.reference import ReferenceAnswer

#: a first difference is excused where the undisturbed run chose by no more than this
NEAR_TIE_MARGIN = 5e-4
#: of all sequences compared; fewer than a hundred of them allow a single one
MAX_NEAR_TIE_SHARE = 0.01


@dataclass(slots=True)
class Difference:
    """The first place where a sequence differs. Margin None: it is no rival token but a wrong length."""

    sequence: int
    place: int
    expected: int | None
    got: int | None
    margin: float | None

    @property
    def is_near_tie(self) -> bool:
        return self.margin is not None and self.margin <= NEAR_TIE_MARGIN


@dataclass(slots=True)
class Comparison:
    """What comparing some sequences gave. `num_close_decisions`: the reference's own choices within the margin,
    which is how many excuses there could have been."""

    num_sequences: int = 0
    num_tokens: int = 0
    num_close_decisions: int = 0
    near_ties: list[Difference] = field(default_factory=list)
    faults: list[Difference] = field(default_factory=list)

    @property
    def num_equal(self) -> int:
        return self.num_sequences - len(self.near_ties) - len(self.faults)

    @property
    def has_too_many_near_ties(self) -> bool:
        return len(self.near_ties) > max(1, int(MAX_NEAR_TIE_SHARE * self.num_sequences))

    def check(self) -> None:
        """Fail on a difference that the margin does not excuse, or on too many that it does."""
        assert not self.faults, f"{len(self.faults)} of {self.num_sequences} sequences differ: {self.faults[0]}"
        assert not self.has_too_many_near_ties, f"{len(self.near_ties)} near ties of {self.num_sequences} sequences"


def compare_answers(expected: Sequence[ReferenceAnswer], got: Sequence[list[int]]) -> Comparison:
    """Compare each sequence up to its first difference: what follows that was given another prompt."""
    comparison = Comparison()
    for sequence, (answer, token_ids) in enumerate(zip(expected, got, strict=True)):
        comparison.num_sequences += 1
        comparison.num_close_decisions += sum(margin <= NEAR_TIE_MARGIN for margin in answer.margins)
        difference = _first_difference(sequence, answer, token_ids)
        if difference is None:
            comparison.num_tokens += len(token_ids)
            continue
        comparison.num_tokens += difference.place
        (comparison.near_ties if difference.is_near_tie else comparison.faults).append(difference)
    return comparison


def _first_difference(sequence: int, answer: ReferenceAnswer, token_ids: list[int]) -> Difference | None:
    for place, (expected, got) in enumerate(zip(answer.token_ids, token_ids, strict=False)):
        if expected != got:
            return Difference(sequence, place, expected, got, answer.margins[place])
    if len(answer.token_ids) != len(token_ids):
        place = min(len(answer.token_ids), len(token_ids))
        expected, got = (tokens[place] if place < len(tokens) else None for tokens in (answer.token_ids, token_ids))
        return Difference(sequence, place, expected, got, None)
    return None
