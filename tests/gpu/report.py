"""Rows of the check, and the one table that shows each of them as soon as it ends.

A run may be killed at any moment: what has been printed and written by then must stand. Knows nothing of what is
checked.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

Figure = float | int | str | bool


class Verdict(StrEnum):
    """`REFUSED`: it is not made for this, and said so. `LEFT_OUT`: this device cannot show it."""

    OK = "ok"
    FAILED = "FAILED"
    REFUSED = "refused"
    LEFT_OUT = "left out"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one case: `text` is for the table, `figures` for the JSON lines, in the units that their names end in."""

    text: str
    figures: Mapping[str, Figure] = field(default_factory=dict)
    verdict: Verdict = Verdict.OK


@dataclass(frozen=True, slots=True)
class Row:
    part: str
    case: str
    verdict: Verdict
    seconds: float
    text: str
    figures: Mapping[str, Figure] = field(default_factory=dict)


def judged(is_right: bool, text: str, figures: Mapping[str, Figure]) -> Outcome:
    return Outcome(text, figures, Verdict.OK if is_right else Verdict.FAILED)


class Report:
    """Prints the table and, with `json_file`, writes a JSON line for each row."""

    def __init__(self, json_file: Path | None = None) -> None:
        self.rows: list[Row] = []
        self._file = None if json_file is None else json_file.open("w", encoding="utf-8")
        print(_line("part", "case", "verdict", "s", "what was found"), flush=True)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        print(_line(row.part, row.case, row.verdict, f"{row.seconds:.1f}", row.text), flush=True)
        if self._file is not None:
            self._file.write(json.dumps(asdict(row)) + "\n")
            self._file.flush()

    @property
    def has_failed(self) -> bool:
        """Whether a row failed, or there is none."""
        return not self.rows or any(row.verdict is Verdict.FAILED for row in self.rows)

    def close(self) -> None:
        """The last line: how many rows came to what."""
        counts = {verdict: sum(row.verdict is verdict for row in self.rows) for verdict in Verdict}
        total_s = sum(row.seconds for row in self.rows)
        print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()) + f" in {total_s:.0f} s", flush=True)
        if self._file is not None:
            self._file.close()


def _line(part: str, case: str, verdict: str, seconds: str, text: str) -> str:
    return f"{part:<11} {case:<36} {verdict:<8} {seconds:>6}  {text}"
