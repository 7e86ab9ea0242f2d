"""A tiny checkpoint on disk, requests, and what Transformers alone answers to them: engines are held against it."""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from transformers.utils.logging import disable_progress_bar

from tests.gpu.report import Outcome, judged
from tests.oracle.compare import compare_answers
from tests.oracle.engine_runs import EngineRun
from tests.oracle.prompts import tiny_prompts
from tests.oracle.reference import ReferenceAnswer
from tests.tiny_models import load_reference, save_tiny_model
from worker.sampler import Sampler, SampleRow
from worker.types import SamplingParams

#: no prompt and its answer are longer
MAX_MODEL_LEN = 192
GREEDY = SamplingParams(24, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(24, temperature=0.8, top_p=0.95, ignore_eos=True)
#: the first ones come in together and outgrow a pool that holds little more than one sequence
LENGTHS = (14, 30, 9, 28, 31, 12, 150, 40, 15, 77)


class TinyModel:
    """Every second request is greedy, the others are sampled, each with a seed of its own."""

    def __init__(self, prompt_lengths: Sequence[int] = LENGTHS) -> None:
        self.prompts = tiny_prompts(prompt_lengths)
        self.params = [GREEDY if place % 2 else replace(SAMPLED, seed=place) for place in range(len(prompt_lengths))]
        self._temporary = tempfile.TemporaryDirectory(prefix="gpu-check-")

    @cached_property
    def folder(self) -> Path:
        disable_progress_bar()
        return save_tiny_model(Path(self._temporary.name), "llama")

    @cached_property
    def answers(self) -> list[ReferenceAnswer]:
        """On the CPU, in float32."""
        model = load_reference(self.folder)
        return [plain_answer(model, prompt, params) for prompt, params in zip(self.prompts, self.params, strict=True)]

    def compare(self, answered: EngineRun) -> Outcome:
        """By the margin rule: a first difference is excused where two scores were as good as equal."""
        comparison = compare_answers(self.answers, answered.answers)
        num_near_ties = len(comparison.near_ties)
        text = f"{comparison.num_equal} of {comparison.num_sequences} answers equal, {num_near_ties} near ties"
        if comparison.faults:
            text += f", {comparison.faults[0]}"
        figures = {
            "num_equal": comparison.num_equal,
            "num_sequences": comparison.num_sequences,
            "num_near_ties": num_near_ties,
        }
        return judged(not comparison.faults and not comparison.has_too_many_near_ties, text, figures)


@torch.inference_mode()
def plain_answer(model: torch.nn.Module, prompt: list[int], params: SamplingParams) -> ReferenceAnswer:
    """All tokens are computed again for each new one: no cache, whose arguments differ between versions."""
    sampler, answer = Sampler(model.config.vocab_size, (), "cpu"), ReferenceAnswer()
    while len(answer.token_ids) < params.max_tokens:
        known = [*prompt, *answer.token_ids]
        logits = model(torch.tensor([known]), use_cache=False).logits[0, -1:].float()
        row = SampleRow(0, params, 0, len(known), prompt, answer.token_ids)
        best = sampler.decision_scores(logits, [row]).topk(2)
        answer.token_ids.append(int(best.indices[0, 0]))
        answer.margins.append(float(best.values[0, 0] - best.values[0, 1]))
    return answer
