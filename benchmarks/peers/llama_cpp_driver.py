"""llama.cpp on a GGUF file: `python llama_cpp_driver.py GGUF NUM_THREADS`. Runs in its own environment.

Uses the C API, since the Python class runs one sequence at a time: all prompts of a row in batches of `BATCH_TOKENS`,
then one token of every sequence a step.
"""

import importlib.metadata
from collections.abc import Iterator

from rows import MAX_MODEL_LEN, MAX_NUM_SEQS, ROWS, Generate, serve

BATCH_TOKENS = 512
#: cells of the cache: the row that needs most
NUM_CELLS = max(
    MAX_MODEL_LEN, *(row.num_requests * (row.num_input_tokens + row.num_output_tokens) for row in ROWS.values())
)


def load(arguments: list[str]) -> tuple[str, Generate]:
    import llama_cpp
    import numpy

    path, num_threads = arguments
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise RuntimeError(f"cannot load {path}")
    vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx, settings.n_seq_max = NUM_CELLS, MAX_NUM_SEQS
    settings.n_batch = settings.n_ubatch = BATCH_TOKENS
    settings.n_threads = settings.n_threads_batch = int(num_threads)
    settings.kv_unified = True
    context = llama_cpp.llama_init_from_model(model, settings)
    if not context:
        raise RuntimeError("cannot make a context")
    memory = llama_cpp.llama_get_memory(context)
    batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)

    def run(tokens: list[tuple[int, int, int, bool]]) -> Iterator[tuple[int, int]]:
        """Tokens as (sequence, position, id, samples); yields (sequence, likeliest next id) for those that sample."""
        batch.n_tokens = len(tokens)
        for place, (sequence, position, token_id, samples) in enumerate(tokens):
            batch.token[place], batch.pos[place] = token_id, position
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, sequence
            batch.logits[place] = samples
        if llama_cpp.llama_decode(context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        for place, (sequence, _, _, samples) in enumerate(tokens):
            if samples:
                logits = llama_cpp.llama_get_logits_ith(context, place)
                yield sequence, int(numpy.ctypeslib.as_array(logits, shape=(vocab_size,)).argmax())

    def generate(prompts: list[list[int]], num_output_tokens: int) -> list[int]:
        llama_cpp.llama_memory_clear(memory, True)
        newest: dict[int, int] = {}
        known = [
            (sequence, position, token_id, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token_id in enumerate(prompt)
        ]
        for start in range(0, len(known), BATCH_TOKENS):
            newest.update(run(known[start : start + BATCH_TOKENS]))
        for number in range(num_output_tokens - 1):
            newest.update(run([(s, len(prompt) + number, newest[s], True) for s, prompt in enumerate(prompts)]))
        return [num_output_tokens] * len(prompts)

    return f"llama-cpp-python {importlib.metadata.version('llama-cpp-python')}", generate


if __name__ == "__main__":
    serve(load)
