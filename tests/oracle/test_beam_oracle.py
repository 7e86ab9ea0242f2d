"""Beam search equals that of Transformers' `generate`, also in company, after preemptions and with a cache."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.oracle.beams import ReferenceBeam, beam_answers, compare_beams
from tests.oracle.compare import Comparison
from tests.oracle.conftest import OracleModel, Tally
from tests.oracle.prompts import tiny_prompts
from tests.tiny_models import load_reference
from worker.config import EngineConfig
from worker.engine import Engine
from worker.text import Tokenizer
from worker.types import BeamParams, EngineRequest, SamplingParams

pytestmark = pytest.mark.oracle

NUM_TOKENS = 20
#: so many stop tokens that some beams of tiny models, whose tokens are all about as likely, end early
STOP_TOKEN_IDS = tuple(range(10, 34))
LENGTHS = (5, 40, 17, 24, 33, 9, 16, 8, 31, 12)
SEARCHES = (
    BeamParams(4),
    BeamParams(3, length_penalty=0.0),
    BeamParams(4, length_penalty=2.0, early_stopping=True),
    BeamParams(2, length_penalty=-1.0),
    BeamParams(4, length_penalty=1.5, early_stopping="never"),
    BeamParams(5, length_penalty=-0.5, early_stopping="never"),
)


def _config(folder: Path) -> EngineConfig:
    return EngineConfig(
        model=str(folder),
        dtype="float32",
        device="cpu",
        max_model_len=128,
        max_num_batched_tokens=48,
        block_size=8,
        num_device_blocks=400,
        chunk_alignment=1,
    )


def _run(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[list[int]]]:
    answers = [[[] for _ in range(own.n)] for own in params]
    for place, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(EngineRequest(str(place), prompt, own), 0.0)
    step = 0
    while engine.has_unfinished():
        for event in engine.step(float(step)):
            assert event.finish_reason in ("stop", "length")
            assert not answers[int(event.request_id)][event.index]
            answers[int(event.request_id)][event.index] = event.token_ids
        engine.block_manager.check_integrity()
        step += 1
    engine.check_integrity()
    return answers


class BeamOracle:
    """Prompts with their searches, and what Transformers finds."""

    def __init__(self, model: OracleModel, prompts: list[list[int]], params: list[SamplingParams]) -> None:
        self.reference = load_reference(model.folder)
        self.prompts, self.params = prompts, params
        self.expected: list[list[ReferenceBeam]] = [
            beam_answers(self.reference, prompt, own) for prompt, own in zip(prompts, params, strict=True)
        ]

    def check(self, engine: Engine, name: str, tally: Tally) -> None:
        total = Comparison()
        got = _run(engine, self.prompts, self.params)
        for prompt, own, expected, answers in zip(self.prompts, self.params, self.expected, got, strict=True):
            compared = compare_beams(self.reference, prompt, own, expected, answers)
            total.num_sequences += compared.num_sequences
            total.num_tokens += compared.num_tokens
            total.near_ties += compared.near_ties
            total.faults += compared.faults
        tally.add(name, total, engine.totals)


@pytest.fixture(scope="module")
def oracle(tiny_model: Callable[[str], OracleModel]) -> BeamOracle:
    """Every prompt with half of the searches."""
    prompts: list[list[int]] = []
    params: list[SamplingParams] = []
    for place, prompt in enumerate(tiny_prompts(LENGTHS)):
        for beam in SEARCHES[place % 2 :: 2]:
            prompts.append(prompt)
            n = min(beam.width, 3)
            params.append(SamplingParams(NUM_TOKENS, n=n, stop_token_ids=STOP_TOKEN_IDS, ignore_eos=True, beam=beam))
    return BeamOracle(tiny_model("llama"), prompts, params)


def test_the_searches_end_in_every_way_and_their_options_matter(oracle: BeamOracle) -> None:
    lengths = {len(beam.token_ids) for beams in oracle.expected for beam in beams}
    assert NUM_TOKENS in lengths
    assert len(lengths) > 5
    bests = [tuple(beams[0].token_ids) for beams in oracle.expected]
    num_each = len(SEARCHES) // 2
    by_prompt = [set(bests[start : start + num_each]) for start in range(0, len(bests), num_each)]
    assert sum(len(different) > 1 for different in by_prompt) > len(LENGTHS) // 2


@pytest.mark.parametrize(
    ("mode", "num_blocks", "num_host_blocks", "cache"),
    [
        ("auto", 400, None, True),
        ("recompute", 44, None, True),
        ("recompute", 44, None, False),
        ("swap", 44, 400, True),
        ("auto", 44, 30, False),
    ],
)
def test_beam_search_equals_transformers(
    oracle: BeamOracle,
    tiny_model: Callable[[str], OracleModel],
    mode: str,
    num_blocks: int,
    num_host_blocks: int | None,
    cache: bool,
    tally: Tally,
) -> None:
    config = replace(
        _config(tiny_model("llama").folder),
        preemption_mode=mode,
        num_device_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        enable_prefix_caching=cache,
    )
    engine = Engine(config)
    oracle.check(engine, f"llama, beams, {mode}, {num_blocks} blocks, cache {'on' if cache else 'off'}", tally)
    num_preemptions = engine.totals.num_preemptions_recompute + engine.totals.num_preemptions_swap
    assert (num_preemptions > 0) == (num_blocks == 44)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(900)
def test_beam_search_equals_transformers_on_real_prompts(
    demo_model: OracleModel, demo_prompts: list[list[int]], tally: Tally
) -> None:
    prompts = [prompt for prompt in sorted(demo_prompts, key=len) if len(prompt) <= 100][-12:]
    assert len(prompts) >= 10
    tokenizer = Tokenizer(demo_model.folder)
    stop = tuple({tokenizer.encode(text)[-1] for text in (".", "\n")} | {tokenizer.eos_token_id or 0})
    params = [
        SamplingParams(NUM_TOKENS, n=2, stop_token_ids=stop, ignore_eos=True, beam=SEARCHES[place % len(SEARCHES)])
        for place in range(len(prompts))
    ]
    oracle = BeamOracle(demo_model, prompts, params)
    assert len({len(beams[0].token_ids) for beams in oracle.expected}) > 3
    config = replace(_config(demo_model.folder), max_num_batched_tokens=64)
    oracle.check(Engine(config), "demo, beams", tally)
    tight = Engine(replace(config, num_device_blocks=28, preemption_mode="recompute"))
    oracle.check(tight, "demo, beams, recompute", tally)
    assert tight.totals.num_preemptions_recompute > 0
