"""`python -m tests.chaos`: kill, stop and redeploy workers under load, and hold every answer to its undisturbed run.

Prints what happened to standard error and, last, one line of JSON. Exit status 1: an answer was lost or changed, a
client waited too long, or something was left behind.
"""

import argparse
import asyncio
import json
import sys
import time

from tests.chaos.client import ask_all
from tests.chaos.disturber import STOP_S, Disturbances, Disturber
from tests.chaos.mix import MixRequest, is_whole, mixed_requests, tokens_of
from tests.chaos.run import ChaosRun, Verdict
from tests.chaos.server import ChaosServer, chaos_server
from tests.oracle.reference import chosen_answer
from tests.tiny_models import load_reference
from worker.demo_model import ensure_demo_model
from worker.text import Tokenizer
from worker.types import SamplingParams

NUM_REQUESTS = 100
#: what a redeploy changes: the token budget, so that steps before and after are cut differently
TOKEN_BUDGETS = (128, 96)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--in-flight", type=int, default=12)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--stop-s", type=float, default=STOP_S, help="0: no worker is stopped")
    parser.add_argument("--no-redeploy", action="store_true")
    args = parser.parse_args()
    wanted = Disturbances(
        args.kills, args.stop_s, None if args.no_redeploy else {"max_num_batched_tokens": TOKEN_BUDGETS[1]}
    )
    verdict = demo_run(args.workers, args.in_flight, wanted)
    print(json.dumps(verdict.to_dict()))
    failures = verdict.failures(args.kills)
    for failure in failures:
        say(f"FAILED {failure}")
    return 1 if failures else 0


def demo_run(num_workers: int, num_in_flight: int, wanted: Disturbances) -> Verdict:
    folder = ensure_demo_model()
    requests = mixed_requests(Tokenizer(folder).encode, NUM_REQUESTS)
    options = {
        "engine": "served",
        "model": "demo",
        "dtype": "float32",
        "num_workers": num_workers,
        "num_threads": 1,
        "max_model_len": 512,
        "max_num_batched_tokens": TOKEN_BUDGETS[0],
        "kv_cache_memory": "128MiB",
        "metrics_port": 0,
        # So that a redeploy hands answers over instead of waiting for their ends.
        "drain_grace_s": 1.0,
    }
    began_s = time.monotonic()
    with chaos_server(options) as server:
        say(f"{num_workers} workers are up after {time.monotonic() - began_s:.0f} s")
        expected = undisturbed(server, requests, num_in_flight)
        say(f"undisturbed answers are there after {time.monotonic() - began_s:.0f} s")
        run = ChaosRun(server, requests, expected, "demo", num_in_flight, DemoMargins())
        disturber = Disturber(server, num_workers, say=lambda text: say(f"{time.monotonic() - began_s:6.1f} s {text}"))
        verdict = run.run(disturber, wanted, NUM_REQUESTS)
    for note in run.notes:
        say(note)
    say(f"took {time.monotonic() - began_s:.0f} s")
    return verdict


def undisturbed(server: ChaosServer, requests: list[MixRequest], num_in_flight: int) -> list[list[list[str]]]:
    bodies = [request.body("demo") for request in requests]
    streams = asyncio.run(ask_all(server.url, bodies, num_in_flight))
    for request, stream in zip(requests, streams, strict=True):
        assert is_whole(request, stream), stream.end
    return [tokens_of(stream) for stream in streams]


class DemoMargins:
    """By how much each token of an undisturbed answer won, from Transformers alone. Loaded when it is asked for."""

    def __init__(self) -> None:
        self._model = None

    def __call__(self, prompt_token_ids: list[int], params: SamplingParams, sample_index: int) -> list[float]:
        self._model = self._model or load_reference(ensure_demo_model())
        return chosen_answer(self._model, prompt_token_ids, params, sample_index).margins


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
