"""Five times too many requests: those that are let in do not notice, the others are told when to come again.

A short form of `python -m benchmarks.serving_overload`, which goes on for a minute.
"""

from pathlib import Path

import pytest

from benchmarks.serving_overload import STEP_S, overload, server_args
from tests.chaos.paced import paced_environment
from tests.chaos.server import chaos_server

pytestmark = [pytest.mark.slow, pytest.mark.ray]

DURATION_S = 15.0


def test_who_is_let_in_does_not_notice_an_overload_and_the_others_are_told_when_to_come_again(paced_folder: Path):
    with chaos_server(server_args(paced_folder), paced_environment(step_ms=1e3 * STEP_S)) as server:
        report = overload(server, DURATION_S)
    print(report)
    assert report.missed() == []
