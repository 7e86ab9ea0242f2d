"""Workers are killed, stopped and replaced under load, and no client notices more than a pause.

The short form on a small engine runs with the fast tests. On the demo model there are three kills, and five in
`make chaos`.
"""

from pathlib import Path

import pytest

from tests.chaos.__main__ import NUM_REQUESTS, demo_run
from tests.chaos.disturber import STOP_S, Disturbances, Disturber
from tests.chaos.mix import mixed_requests, paced_answers
from tests.chaos.paced import MODEL, paced_args, paced_environment
from tests.chaos.run import ChaosRun
from tests.chaos.server import chaos_server
from tests.paced_engine import paced_model
from worker.text import Tokenizer

pytestmark = pytest.mark.ray

#: `make chaos` holds the pause to its goal; here the machine may have other work, and a gap is no lost answer
BUSY_GAP_S = 15.0
#: one before a worker is stopped, two while it is
NUM_KILLS = 3


def test_a_worker_that_is_killed_under_load_costs_a_pause_and_no_token(paced_folder: Path):
    tokenizer, model = Tokenizer(paced_folder), paced_model(paced_folder)
    requests = mixed_requests(tokenizer.encode, 24)
    expected = [paced_answers(model, tokenizer, request) for request in requests]
    with chaos_server(paced_args(paced_folder, 2), paced_environment(step_ms=20)) as server:
        run = ChaosRun(server, requests, expected, MODEL)
        verdict = run.run(Disturber(server, 2), Disturbances(num_kills=1, stop_s=0), min_requests=24)
    assert verdict.failures(num_kills=1, most_gap_s=BUSY_GAP_S) == [], run.notes


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(600)
def test_the_demo_model_keeps_every_answer_through_three_kills_a_stop_and_a_redeploy():
    wanted = Disturbances(NUM_KILLS, STOP_S, redeploy={"max_num_batched_tokens": 96})
    verdict = demo_run(num_workers=3, num_in_flight=12, wanted=wanted)
    print(verdict.to_dict())
    assert verdict.failures(NUM_KILLS, most_gap_s=BUSY_GAP_S) == []
    assert verdict.requests >= NUM_REQUESTS
