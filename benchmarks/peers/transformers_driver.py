"""Transformers' continuous batching: `python transformers_driver.py MODEL_FOLDER NUM_THREADS`, in its own venv."""

from rows import Generate, serve


def load(arguments: list[str]) -> tuple[str, Generate]:
    import torch
    import transformers

    folder, num_threads = arguments
    torch.set_num_threads(int(num_threads))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()

    def generate(prompts: list[list[int]], num_output_tokens: int) -> list[int]:
        settings = transformers.GenerationConfig(
            max_new_tokens=num_output_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        outputs = model.generate_batch(inputs=prompts, generation_config=settings)
        return [len(output.generated_tokens) for output in outputs.values()]

    return f"transformers {transformers.__version__} continuous batching", generate


if __name__ == "__main__":
    serve(load)
