"""An engine as an operator starts it, from a checkpoint and without options: how long that takes, how much memory it
gives to its cache, and whether that leaves enough for a full step and a long prompt.
"""

import gc
import tempfile
import time
from dataclasses import replace

import torch
from transformers.utils.logging import disable_progress_bar

from tests.gpu.models import random_weights, weight_bytes
from tests.gpu.parts import Bench, Case
from tests.gpu.report import Outcome, Verdict, judged
from tests.oracle.engine_runs import greedy, run_on
from worker.config import EngineConfig
from worker.engine import Engine

NUM_TOKENS = 8
PROMPT_LEN = 20
#: on a CPU, where a share of the machine's memory is the default: nothing is learnt from filling that
CPU_CACHE_BYTES = 2**24


def cases(bench: Bench) -> list[Case]:
    return [Case(f"{bench.sizes.models[0].name} from disk", lambda: start(bench))]


def start(bench: Bench) -> Outcome:
    sizes, size = bench.sizes, bench.sizes.models[0]
    if not bench.has_memory_for(2 * weight_bytes(size, sizes.dtype)):
        return Outcome("the device has not the memory for it", verdict=Verdict.LEFT_OUT)
    disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        random_weights(size, sizes.dtype, bench.device).save_pretrained(folder)
        gc.collect()  # or the engine finds that memory taken
        config = EngineConfig(model=folder, device=bench.device)
        if bench.device == "cpu":
            longest = max(sizes.prefill_contexts) + NUM_TOKENS
            config = replace(config, kv_cache_memory=CPU_CACHE_BYTES, max_model_len=longest)
        began_s = time.monotonic()
        engine = Engine(config)
        start_s = time.monotonic() - began_s
    lengths = [PROMPT_LEN] * max(sizes.decode_batches) + [max(sizes.prefill_contexts)]
    prompts = [[(number + place) % 100 + 3 for place in range(length)] for number, length in enumerate(lengths)]
    answered = run_on(engine, prompts, [greedy(NUM_TOKENS)] * len(prompts))
    cache_bytes = engine.num_device_blocks * engine.num_block_bytes
    text = (
        f"started in {start_s:.1f} s; {engine.attention_backend}, {engine.num_device_blocks} blocks of "
        f"{engine.block_size}, {cache_bytes / 2**30:.1f} GiB"
    )
    figures = {"start_s": start_s, "cache_bytes": cache_bytes, "backend": engine.attention_backend}
    if bench.device == "cuda":
        figures["peak_bytes"] = torch.cuda.max_memory_reserved()
        text += f"; {torch.cuda.max_memory_reserved() / bench.fact('memory_bytes'):.0%} of the device at most"
    return judged(all(len(answer) == NUM_TOKENS for answer in answered.answers), text, figures)
