"""How long running answers wait when a long prompt arrives: `chunked_prefill` and `default` side by side.

Eight answers are running when one long prompt comes in. For each policy this prints the worst time between two
tokens of a running answer from then until the long prompt has its first token, and, from the step records, how
many of the eight got a token in the steps that computed the prompt. Exits with 1 if `chunked_prefill` left one out.
"""

import json
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from benchmarks.options import Parser, count, run_program
from worker.config import EngineConfig
from worker.engine import Engine
from worker.types import EngineRequest, SamplingParams

NUM_ANSWERS = 8
NUM_SHORT_PROMPT_TOKENS = 32
#: tokens that each answer has when the long prompt arrives
NUM_TOKENS_BEFORE = 16
LONG_PROMPT_TOKENS = 4096
QUICK_LONG_PROMPT_TOKENS = 512
BLOCK_SIZE = 16
LONG = "long"
POLICIES = ("chunked_prefill", "default")


@dataclass(slots=True)
class Result:
    """Times in seconds. `answers_served` has, for each step that computed a part of the prompt, how many answers
    got a token in it."""

    budget: int
    gap_before_s: float = 0.0
    worst_gap_s: float = 0.0
    first_token_s: float = 0.0
    answers_served: list[int] = field(default_factory=list)


def engine_config(model: str, policy: str, num_prompt_tokens: int, num_threads: int | None) -> EngineConfig:
    """Room for everybody, so that nothing but the policy makes anyone wait."""
    max_model_len = 2 * num_prompt_tokens
    num_blocks = (num_prompt_tokens * 3) // BLOCK_SIZE + NUM_ANSWERS * 16
    return EngineConfig(
        model=model,
        scheduler_policy=policy,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_model_len if policy == "default" else None,
        block_size=BLOCK_SIZE,
        num_device_blocks=num_blocks,
        num_threads=num_threads,
    )


def measure(engine: Engine, num_prompt_tokens: int) -> Result:
    draw = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(engine.vocab_size) for _ in range(count)]

    def add(request_id: str, prompt: list[int]) -> None:
        room = engine.max_model_len - len(prompt)
        params = SamplingParams(max_tokens=room, temperature=0.0, ignore_eos=True)
        engine.add_request(EngineRequest(request_id, prompt, params), time.monotonic())

    token_times: dict[str, list[float]] = {f"answer-{number}": [] for number in range(NUM_ANSWERS)}
    for request_id in token_times:
        add(request_id, tokens(NUM_SHORT_PROMPT_TOKENS))
    while any(len(times) < NUM_TOKENS_BEFORE for times in token_times.values()):
        _step(engine, token_times)
    result = Result(engine.config.max_num_batched_tokens)
    result.gap_before_s = statistics.median(gap for times in token_times.values() for gap in _gaps(times[1:]))

    newest_step_id = engine.scheduler.records.newest.step_id
    arrival_s = time.monotonic()
    token_times[LONG] = []
    add(LONG, tokens(num_prompt_tokens))
    while not token_times[LONG]:
        _step(engine, token_times)
    # One more, so that whoever waited during the whole prompt has a token on its far side.
    _step(engine, token_times)
    first_token_s = token_times.pop(LONG)[0]
    result.first_token_s = first_token_s - arrival_s
    for times in token_times.values():
        last_before = max(place for place, at in enumerate(times) if at <= arrival_s)
        result.worst_gap_s = max(result.worst_gap_s, *_gaps(times[last_before:]))
    for record in engine.records_since(newest_step_id):
        if any(chunk.request_id == LONG for chunk in record.prefill_chunks):
            result.answers_served.append(len(token_times.keys() & set(record.decode_request_ids)))
    for request_id in (*token_times, LONG):
        engine.abort(request_id)
    return result


def _step(engine: Engine, token_times: dict[str, list[float]]) -> None:
    events = engine.step(time.monotonic())
    now = time.monotonic()
    for event in events:
        if event.token_ids:
            token_times[event.request_id].append(now)


def _gaps(times: list[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]


def report(results: dict[str, Result], num_prompt_tokens: int) -> str:
    def line(title: str, cells: list[str]) -> str:
        return f"{title:<46}" + "".join(f"{cell:>18}" for cell in cells)

    columns = list(results.values())
    served = [f"{min(column.answers_served)} of {NUM_ANSWERS}" for column in columns]
    return "\n".join(
        [
            f"{NUM_ANSWERS} answers are running, a prompt of {num_prompt_tokens} tokens arrives",
            line("", list(results)),
            line("token budget of a step", [str(column.budget) for column in columns]),
            line("gap between tokens before, median", [f"{column.gap_before_s * 1e3:.0f} ms" for column in columns]),
            line("worst gap of a running answer", [f"{column.worst_gap_s * 1e3:.0f} ms" for column in columns]),
            line("time to the prompt's first token", [f"{column.first_token_s * 1e3:.0f} ms" for column in columns]),
            line("steps that computed the prompt", [str(len(column.answers_served)) for column in columns]),
            line("answers with a token in each of them, at least", served),
        ]
    )


def as_dict(results: dict[str, Result], num_prompt_tokens: int) -> dict[str, Any]:
    return {
        "num_answers": NUM_ANSWERS,
        "num_prompt_tokens": num_prompt_tokens,
        "policies": {
            policy: {
                "budget": result.budget,
                "median_gap_before_ms": round(result.gap_before_s * 1e3, 2),
                "worst_gap_ms": round(result.worst_gap_s * 1e3, 2),
                "first_token_ms": round(result.first_token_s * 1e3, 2),
                "num_prompt_steps": len(result.answers_served),
                "least_answers_served": min(result.answers_served),
            }
            for policy, result in results.items()
        },
    }


def main() -> int:
    parser = Parser("benchmarks.long_prompt_gap", __doc__)
    parser.add_argument("--model", default="demo", help="demo, a folder, or a Hub id (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help=f"a prompt of {QUICK_LONG_PROMPT_TOKENS} tokens instead")
    parser.add_argument("--num-threads", type=count, help="CPU threads of the model")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    num_prompt_tokens = QUICK_LONG_PROMPT_TOKENS if args.quick else LONG_PROMPT_TOKENS
    results = {}
    for policy in POLICIES:
        with parser.refusing():
            engine = Engine(engine_config(args.model, policy, num_prompt_tokens, args.num_threads))
        print(f"running with {policy}", file=sys.stderr, flush=True)
        results[policy] = measure(engine, num_prompt_tokens)
    print(json.dumps(as_dict(results, num_prompt_tokens)) if args.json else report(results, num_prompt_tokens))
    return 0 if min(results["chunked_prefill"].answers_served) == NUM_ANSWERS else 1


if __name__ == "__main__":
    run_program(main)
