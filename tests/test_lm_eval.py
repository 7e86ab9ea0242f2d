"""lm-eval scores multiple choices through our completions as it does with Transformers itself."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.local_server import MODEL_NAME, serving_in_process
from worker.config import EngineConfig
from worker.demo_model import ensure_demo_model

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install -e '.[evaluation]'")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.model,
    # lm-eval and what it imports use much that is going away.
    pytest.mark.filterwarnings("ignore"),
]

TOLERANCE = 1e-3
MAX_MODEL_LEN = 256
CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin", "Japan": "Tokyo", "China": "Beijing",
    "Egypt": "Cairo", "Russia": "Moscow", "Greece": "Athens", "Poland": "Warsaw", "Kenya": "Nairobi", "Peru": "Lima",
    "Cuba": "Havana", "Norway": "Oslo", "Ireland": "Dublin", "Portugal": "Lisbon", "Austria": "Vienna",
    "Hungary": "Budapest", "Canada": "Ottawa", "Iran": "Tehran", "Iraq": "Baghdad", "Thailand": "Bangkok",
    "Finland": "Helsinki", "Sweden": "Stockholm", "Denmark": "Copenhagen",
}  # fmt: skip
CONFIG = EngineConfig(model="demo", dtype="float32", device="cpu", max_model_len=MAX_MODEL_LEN, max_num_seqs=16)
SETTINGS: dict[str, dict[str, Any]] = {
    "with the prefix cache": {"num_device_blocks": 200},
    "without it": {"num_device_blocks": 200, "enable_prefix_caching": False},
    "in a pool for two or three prompts": {"num_device_blocks": 18, "max_num_batched_tokens": 24},
}


def items() -> list[dict[str, Any]]:
    """50 questions of four choices each, the right one in every place."""
    questions = []
    cities = list(CAPITALS.values())
    for number, (country, city) in enumerate(CAPITALS.items()):
        others = [cities[(number + step) % len(cities)] for step in (3, 7, 12)]
        for form, text in enumerate((f"The capital of {country} is", f"Q: What is {country}'s capital?\nA:")):
            answer = (number + form) % 4
            choices = [*others[:answer], city, *others[answer:]]
            questions.append({"question": text, "choices": choices, "answer": answer})
    return questions


def task() -> dict[str, Any]:
    from datasets import Dataset

    return {
        "task": "capitals",
        "custom_dataset": lambda **_: {"test": Dataset.from_list(items())},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "question",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }


def evaluate(model: Any, **options: Any) -> tuple[float, list[tuple[float, bool]]]:
    """Accuracy, and of each choice of each question its log-likelihood and whether it is the greedy answer."""
    from lm_eval import simple_evaluate

    results = simple_evaluate(
        model=model, tasks=[task()], log_samples=True, bootstrap_iters=0, verbosity="ERROR", **options
    )
    samples = sorted(results["samples"]["capitals"], key=lambda sample: sample["doc_id"])
    scores = [(float(score[0]), bool(score[1])) for sample in samples for [score] in sample["resps"]]
    return results["results"]["capitals"]["acc,none"], scores


@pytest.fixture(scope="module")
def expected() -> Iterator[tuple[float, list[tuple[float, bool]]]]:
    from lm_eval.models.huggingface import HFLM

    num_threads = torch.get_num_threads()
    folder = str(ensure_demo_model())
    yield evaluate(HFLM(folder, dtype="float32", device="cpu", batch_size=8, max_length=MAX_MODEL_LEN))
    torch.set_num_threads(num_threads)


@pytest.mark.parametrize("name", SETTINGS)
def test_fifty_questions_get_the_log_likelihoods_of_transformers(
    expected: tuple[float, list[tuple[float, bool]]], name: str
) -> None:
    with serving_in_process(replace(CONFIG, **SETTINGS[name])) as server:
        accuracy, scores = evaluate(
            "local-completions",
            model_args={
                "model": MODEL_NAME,
                "base_url": f"{server.url}/v1/completions",
                "tokenizer_backend": "huggingface",
                "tokenizer": str(server.engine.tokenizer_folder),
                "tokenized_requests": True,
                "num_concurrent": 8,
                "batch_size": 4,
                "max_length": MAX_MODEL_LEN,
            },
        )
        assert server.engine.totals.num_blocks_hit == 0
    assert len(scores) == 4 * len(items()) == 200
    assert accuracy == expected[0]
    assert [score for score, _ in scores] == pytest.approx([score for score, _ in expected[1]], abs=TOLERANCE)
    # The model knows something, so that the comparison is of more than noise.
    assert accuracy > 0.5
