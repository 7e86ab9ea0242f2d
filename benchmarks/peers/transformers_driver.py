"""Transformers' continuous batching: `python transformers_driver.py MODEL_FOLDER NUM_THREADS`, in its own venv.

One manager stays loaded, with a cache that holds any row: sizing it anew for each call takes most of a minute on a CPU.
"""

from rows import MAX_MODEL_LEN, MAX_NUM_SEQS, ROWS, Generate, serve

PAGE_TOKENS = 256
NUM_PAGES = max(
    row.num_requests * -(-(row.num_input_tokens + row.num_output_tokens) // PAGE_TOKENS) for row in ROWS.values()
)
#: of one step, as for llama.cpp
BATCH_TOKENS = 512
RESULT_TIMEOUT_S = 600.0


def load(arguments: list[str]) -> tuple[str, Generate]:
    import torch
    import transformers

    folder, num_threads = arguments
    torch.set_num_threads(int(num_threads))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()
    # The loop's thread runs in the mode in which it was started.
    with torch.inference_mode():
        manager = model.init_continuous_batching(
            generation_config=transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=transformers.ContinuousBatchingConfig(
                page_size=PAGE_TOKENS,
                num_blocks=NUM_PAGES + MAX_MODEL_LEN // PAGE_TOKENS,
                max_batch_tokens=BATCH_TOKENS,
                max_requests_per_batch=MAX_NUM_SEQS,
                allow_block_sharing=False,
            ),
        )
        manager.start()

    def generate(prompts: list[list[int]], num_output_tokens: int) -> list[int]:
        for prompt in prompts:
            manager.add_request(prompt, max_new_tokens=num_output_tokens, eos_token_id=-1)
        lengths = []
        while len(lengths) < len(prompts):
            output = manager.get_result(timeout=RESULT_TIMEOUT_S)
            if output is None or output.error is not None:
                raise RuntimeError("continuous batching has failed" if output is None else str(output.error))
            if output.is_finished():
                lengths.append(len(output.generated_tokens))
        return lengths

    return f"transformers {transformers.__version__} continuous batching", generate


if __name__ == "__main__":
    serve(load)
