"""What the paced engines write down of their requests, joined to what clients saw; all on one monotonic clock.

Owns the reading of the logs. Knows neither servers nor goals.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.serving_runs import Answer

#: an engine writes when it turns idle
_WRITTEN_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Departures:
    """What the engines' logs say of each request: when it came, and when each of its tokens left."""

    arrived_s: dict[str, float]
    left_s: dict[str, list[float]]

    @classmethod
    def read(cls, folder: Path) -> "Departures":
        arrived_s: dict[str, float] = {}
        left_s: dict[str, list[float]] = {}
        for path in folder.glob("*.jsonl"):
            for line in path.read_text().splitlines():
                kind, time_s, request_id, num_tokens = json.loads(line)
                if kind == "arrived":
                    arrived_s[request_id] = time_s
                else:
                    left_s.setdefault(request_id, []).extend([time_s] * num_tokens)
        return cls(arrived_s, left_s)

    @classmethod
    def of(cls, folder: Path, answers: list[Answer]) -> "Departures":
        """As soon as all these answers are in the logs."""
        deadline_s = time.monotonic() + _WRITTEN_TIMEOUT_S
        while True:
            found = cls.read(folder)
            if all(len(found.left_s.get(answer.request_id, ())) == answer.num_tokens for answer in answers):
                return found
            assert time.monotonic() < deadline_s, "the engines' logs do not hold all tokens"
            time.sleep(0.1)

    def lags_s(self, answers: list[Answer]) -> list[float]:
        return [
            came_s - left_s
            for answer in answers
            for came_s, left_s in zip(answer.times_s, self.left_s[answer.request_id], strict=True)
        ]
