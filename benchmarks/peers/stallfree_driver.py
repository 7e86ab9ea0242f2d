"""This project's engine, in process: `python stallfree_driver.py MODEL_FOLDER NUM_THREADS [OPTION=VALUE...]`."""

import importlib.metadata
import time
from dataclasses import fields
from typing import Any

from rows import MAX_MODEL_LEN, MAX_NUM_SEQS, Generate, serve

from worker.config import EngineConfig
from worker.engine import Engine
from worker.types import EngineRequest, SamplingParams


def load(arguments: list[str]) -> tuple[str, Generate]:
    folder, num_threads, *options = arguments
    given: dict[str, Any] = dict(option.split("=", 1) for option in options)
    for field in fields(EngineConfig):
        if field.name in given and "int" in str(field.type):
            given[field.name] = int(given[field.name])
    config = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": MAX_NUM_SEQS, **given}
    engine = Engine(EngineConfig(model=folder, num_threads=int(num_threads), **config))

    def generate(prompts: list[list[int]], num_output_tokens: int) -> list[int]:
        params = SamplingParams(max_tokens=num_output_tokens, temperature=0.0, ignore_eos=True)
        for number, prompt in enumerate(prompts):
            engine.add_request(EngineRequest(str(number), prompt, params), time.monotonic())
        lengths = [0] * len(prompts)
        while engine.has_unfinished():
            for event in engine.step(time.monotonic()):
                lengths[int(event.request_id)] += len(event.token_ids)
        return lengths

    return f"stallfree {importlib.metadata.version('stallfree')}", generate


if __name__ == "__main__":
    serve(load)
