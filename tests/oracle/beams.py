"""Beam search as Transformers runs it by itself, and the comparison with what the engine found.

Knows no engine. A different answer is a near tie where the reference model scores it as high as its own.
"""

from dataclasses import dataclass

import torch
from transformers import GenerationConfig

from tests.oracle.compare import NEAR_TIE_MARGIN, Comparison, Difference
from worker.types import SamplingParams


@dataclass(slots=True)
class ReferenceBeam:
    token_ids: list[int]
    score: float


@torch.inference_mode()
def beam_answers(model: torch.nn.Module, prompt_token_ids: list[int], params: SamplingParams) -> list[ReferenceBeam]:
    """The `params.n` best answers of `model.generate`, which ends at `params.stop_token_ids`."""
    assert params.beam is not None
    outputs = model.generate(
        torch.tensor([prompt_token_ids]),
        attention_mask=torch.ones((1, len(prompt_token_ids)), dtype=torch.long),
        generation_config=GenerationConfig(
            max_new_tokens=params.max_tokens,
            num_beams=params.beam.width,
            num_return_sequences=params.n,
            length_penalty=params.beam.length_penalty,
            early_stopping=params.beam.early_stopping,
            do_sample=False,
            eos_token_id=list(params.stop_token_ids) or None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        ),
    )
    stop = frozenset(params.stop_token_ids)
    answers = []
    for row, score in zip(outputs.sequences.tolist(), outputs.sequences_scores.tolist(), strict=True):
        token_ids = row[len(prompt_token_ids) :]
        end = next((place for place, token_id in enumerate(token_ids) if token_id in stop), len(token_ids))
        answers.append(ReferenceBeam(token_ids[: end + 1], score))
    return answers


def compare_beams(
    model: torch.nn.Module,
    prompt_token_ids: list[int],
    params: SamplingParams,
    expected: list[ReferenceBeam],
    got: list[list[int]],
) -> Comparison:
    """Each answer against the one of its rank."""
    comparison = Comparison()
    for rank, (beam, token_ids) in enumerate(zip(expected, got, strict=True)):
        comparison.num_sequences += 1
        comparison.num_tokens += len(token_ids)
        if beam.token_ids == token_ids:
            continue
        margin = abs(beam.score - _score(model, prompt_token_ids, token_ids, params))
        place = next(
            (place for place, pair in enumerate(zip(beam.token_ids, token_ids, strict=False)) if pair[0] != pair[1]),
            min(len(beam.token_ids), len(token_ids)),
        )
        difference = Difference(rank, place, None, None, margin)
        (comparison.near_ties if margin <= NEAR_TIE_MARGIN else comparison.faults).append(difference)
    return comparison


@torch.inference_mode()
def _score(
    model: torch.nn.Module, prompt_token_ids: list[int], token_ids: list[int], params: SamplingParams
) -> float:
    """The score of this answer by the reference model: its log-probability over its length to the penalty's power."""
    assert params.beam is not None
    logits = model(torch.tensor([prompt_token_ids + token_ids])).logits[0].float()
    rows = torch.log_softmax(logits[len(prompt_token_ids) - 1 : -1], dim=-1)
    total = rows.gather(1, torch.tensor(token_ids).unsqueeze(1)).sum().item()
    return float(total / len(token_ids) ** params.beam.length_penalty)
