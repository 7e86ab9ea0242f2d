"""What Python costs in a decode step: all of the engine's step but the model's forward pass and the sampler's argmax.

Prints a JSON line for each number of running answers. In every step that decodes all of them the forward pass is
timed where it is called, and the argmax of the greedy sampler once more on the same logits, after the step; the rest
of the step is Python: scheduling, block tables, the flat batch, events, records.
"""

import json
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.options import Parser, count, run_program, whole_number
from worker.config import EngineConfig
from worker.engine import Engine
from worker.sampled_rows import NO_TOKEN
from worker.types import EngineRequest, SamplingParams

NUMS_RUNNING = (32, 256)
NUM_PROMPT_TOKENS = 16
MAX_NUM_BATCHED_TOKENS = 2048
NUM_MEASURED_STEPS = 60


@dataclass(slots=True)
class _LastForward:
    """Of the step that ran last: how long its forward pass took, and what came of it."""

    duration_s: float = 0.0
    logits: torch.Tensor | None = None


def timed_forward(engine: Engine) -> _LastForward:
    """From now on the engine's model notes each of its passes."""
    last = _LastForward()
    model: Any = engine._runner._model  # type: ignore[attr-defined]
    forward = model.forward

    def timed(*arguments: Any) -> torch.Tensor:
        began_s = time.perf_counter()
        logits: torch.Tensor = forward(*arguments)
        last.duration_s = time.perf_counter() - began_s
        last.logits = logits
        return logits

    model.forward = timed
    return last


def argmax_s(engine: Engine, logits: torch.Tensor) -> float:
    """Seconds that the greedy sampler's argmax of these logits takes."""
    candidates = engine._step_sampler._sampler._candidates  # type: ignore[attr-defined]
    logits, places = logits[:, : engine.vocab_size], list(range(len(logits)))
    began_s = time.perf_counter()
    if candidates is None:
        logits.max(dim=-1)
    else:
        candidates.best(logits, places, NO_TOKEN)
    return time.perf_counter() - began_s


def python_s(engine: Engine, num_running: int) -> list[float]:
    """Seconds of each step in which all of them decoded, less its forward pass and its argmax."""
    last = timed_forward(engine)
    params = SamplingParams(max_tokens=NUM_MEASURED_STEPS + num_running // 8 + 8, temperature=0.0, ignore_eos=True)
    for number in range(num_running):
        prompt = [(1000 + (7 * number + place) % 10_000) % engine.vocab_size for place in range(NUM_PROMPT_TOKENS)]
        engine.add_request(EngineRequest(str(number), prompt, params), time.monotonic())
    rests_s: list[float] = []
    while engine.has_unfinished():
        began_s = time.perf_counter()
        engine.step(time.monotonic())
        step_s = time.perf_counter() - began_s
        record = engine.scheduler.records.newest
        if record.num_decodes == num_running and not record.prefill_chunks and last.logits is not None:
            rests_s.append(step_s - last.duration_s - argmax_s(engine, last.logits))
    return rests_s


def main() -> None:
    parser = Parser("benchmarks.python_per_step", __doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--num-threads", type=count)
    parser.add_argument("--running", type=whole_number(1, MAX_NUM_BATCHED_TOKENS), nargs="+", default=NUMS_RUNNING)
    parser.add_argument("--json", action="store_true", help="one JSON object a line, as without it")
    args = parser.parse_args()
    for num_running in args.running:
        config = EngineConfig(
            model=args.model,
            num_threads=args.num_threads,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            max_num_seqs=num_running,
            max_model_len=512,
        )
        with parser.refusing():
            rests_s = python_s(Engine(config), num_running)
        if not rests_s:
            parser.error(f"--running: {num_running} answers never decoded together here")
        line = {
            "running": num_running,
            "python_ms": round(statistics.median(rests_s) * 1e3, 3),
            "python_p90_ms": round(sorted(rests_s)[int(0.9 * len(rests_s))] * 1e3, 3),
            "steps": len(rests_s),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    run_program(main)
