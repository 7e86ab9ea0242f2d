"""The engine as it starts in production, from a tiny checkpoint on disk, on each backend: its answers are those of
Transformers alone, with chunks, mixed steps, the prefix cache and preemption by both ways.
"""

from dataclasses import replace

import torch

from tests.gpu.backends import backend_names
from tests.gpu.parts import Bench, Case
from tests.gpu.report import Outcome, Verdict, judged
from tests.gpu.tiny_answers import GREEDY, MAX_MODEL_LEN, TinyModel
from tests.oracle.engine_runs import run_on
from worker.config import ConfigError, EngineConfig
from worker.engine import Engine

BLOCK_SIZE = 16
#: blocks beyond those of one sequence, and the way of preemption that this must force
SQUEEZES = {"ample": (100, None), "recompute": (2, "recompute"), "swap": (2, "swap")}
#: Of a device's memory, where the engine chooses the size of its cache: a tiny model has tiny blocks. Most of it is for
#: graphs and for staging memory.
CHOSEN_BYTES = 2**31


def cases(bench: Bench) -> list[Case]:
    model = TinyModel()
    squeezed = [
        Case(f"{name} float32 {squeeze}", lambda name=name, squeeze=squeeze: run(bench, model, name, squeeze))
        for name in bench.sizes.engine_backends or backend_names(bench.device)
        for squeeze in SQUEEZES
    ]
    return [
        *squeezed,
        Case("defaults, float32", lambda: run_with_defaults(bench, model, "float32")),
        Case("defaults, bfloat16", lambda: run_with_defaults(bench, model, "bfloat16")),
    ]


def run(bench: Bench, model: TinyModel, backend: str, squeeze: str) -> Outcome:
    spare, mode = SQUEEZES[squeeze]
    config = EngineConfig(
        model=str(model.folder),
        dtype="float32",
        device=bench.device,
        attention_backend=backend,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=64,
        max_num_seqs=8,
        block_size=BLOCK_SIZE,
        chunk_alignment=BLOCK_SIZE,
        num_device_blocks=MAX_MODEL_LEN // BLOCK_SIZE + 1 + spare,
        num_host_blocks=100,
        preemption_mode=mode or "auto",
    )
    try:
        engine = Engine(config)
    except ConfigError as error:
        return Outcome(str(error), {"refused": str(error)}, Verdict.REFUSED)
    answered = run_on(engine, model.prompts, model.params)
    totals = answered.totals
    forced = {"recompute": totals.num_preemptions_recompute, "swap": totals.num_preemptions_swap}
    if mode is not None and not forced[mode]:
        return Outcome(f"nothing was preempted by {mode}", verdict=Verdict.FAILED)
    return model.compare(answered)


def run_with_defaults(bench: Bench, model: TinyModel, dtype: str) -> Outcome:
    """All else as it is for an operator who states nothing. In bfloat16 other tokens may come; all must come."""
    config = EngineConfig(model=str(model.folder), dtype=dtype, device=bench.device, max_model_len=MAX_MODEL_LEN)
    if bench.device == "cpu":
        config = replace(config, kv_cache_memory=CHOSEN_BYTES // 64)
    else:
        free, total = torch.cuda.mem_get_info()
        config = replace(config, gpu_memory_utilization=min(1.0, (total - free + CHOSEN_BYTES) / total))
    engine = Engine(config)
    answered = run_on(engine, model.prompts, model.params)
    outcome = model.compare(answered)
    text = f"{engine.attention_backend}, {engine.num_device_blocks} blocks of {engine.block_size}; "
    if dtype == "float32":
        return replace(outcome, text=text + outcome.text)
    text += f"{outcome.figures['num_equal']} of {outcome.figures['num_sequences']} answers are those of float32"
    return judged(all(len(answer) == GREEDY.max_tokens for answer in answered.answers), text, outcome.figures)
