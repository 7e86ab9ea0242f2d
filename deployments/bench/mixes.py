"""Synthetic mixes of requests, such as `chat:0.9@128/64,long:0.1@4096/32`: names, shares, lengths in tokens."""

import re
from dataclasses import dataclass
from random import Random

_PART = re.compile(r"(?P<name>[\w.-]+):(?P<share>[0-9.]+)@(?P<input>[0-9-]+)/(?P<output>[0-9-]+)")
#: of a prompt or an answer: no model's context is as long
MOST_TOKENS = 2**24
_LENGTHS = re.compile(r"([0-9]+)(?:-([0-9]+))?")


@dataclass(frozen=True, slots=True)
class LengthRange:
    """A number of tokens, drawn evenly from `low` to `high`, both included."""

    low: int
    high: int

    def draw(self, draw: Random) -> int:
        return self.low if self.low == self.high else draw.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True, slots=True)
class MixPart:
    name: str
    share: float
    num_input_tokens: LengthRange
    num_output_tokens: LengthRange


def parse_lengths(text: str) -> LengthRange:
    """`128` or `64-256`. Raises ValueError for anything else, for no tokens at all and for absurdly many."""
    match = _LENGTHS.fullmatch(text)
    if match is None:
        raise ValueError(f"must be a number of tokens or a range such as 64-256, got {text!r}")
    low = int(match[1])
    high = int(match[2]) if match[2] else low
    if not 1 <= low <= high:
        raise ValueError(f"must be at least 1 token and rise from low to high, got {text!r}")
    if high > MOST_TOKENS:
        raise ValueError(f"must be at most {MOST_TOKENS:,} tokens, got {text!r}")
    return LengthRange(low, high)


def parse_mix(text: str) -> list[MixPart]:
    """Parts of a mix; shares are relative to their sum. Raises ValueError with the part that is wrong."""
    parts = []
    for item in text.split(","):
        match = _PART.fullmatch(item.strip())
        if match is None:
            raise ValueError(f"each part must read name:share@input/output, got {item.strip()!r}")
        try:
            share = float(match["share"])
        except ValueError:
            raise ValueError(f"the share must be a number, got {match['share']!r}") from None
        if share <= 0:
            raise ValueError(f"the share must be above 0, got {match['share']!r}")
        parts.append(MixPart(match["name"], share, parse_lengths(match["input"]), parse_lengths(match["output"])))
    names = [part.name for part in parts]
    if len(set(names)) < len(names):
        raise ValueError(f"a name occurs twice in {text!r}")
    return parts


def draw_parts(parts: list[MixPart], count: int, draw: Random) -> list[MixPart]:
    """`count` parts in random order, each as often as its share says, to within one.

    Drawing each by chance would make the load of two seeds differ by far more than what is measured.
    """
    total = sum(part.share for part in parts)
    drawn: list[MixPart] = []
    owed = [0.0] * len(parts)
    for _ in range(count):
        for place, part in enumerate(parts):
            owed[place] += part.share / total
        place = max(range(len(parts)), key=owed.__getitem__)
        owed[place] -= 1.0
        drawn.append(parts[place])
    draw.shuffle(drawn)
    return drawn
