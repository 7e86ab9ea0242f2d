"""Models, prompts and reference answers, each made once; the counts of every comparison, printed at the end."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from tests.oracle.compare import MAX_NEAR_TIE_SHARE, Comparison
from tests.oracle.reference import ReferenceAnswer, chosen_answer, greedy_answer
from tests.real_prompts import real_prompts
from tests.tiny_models import load_reference, save_tiny_model
from worker.demo_model import ensure_demo_model
from worker.engine import EngineTotals
from worker.text import Tokenizer
from worker.types import SamplingParams


class OracleModel:
    """A checkpoint, and Transformers' answers for it, each computed when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._model: torch.nn.Module | None = None
        self._answers: dict[tuple[tuple[int, ...], SamplingParams, int], ReferenceAnswer] = {}

    def answer(
        self, prompt_token_ids: list[int], params: SamplingParams, sample_index: int = 0, guess: Sequence[int] = ()
    ) -> ReferenceAnswer:
        """A `guess` makes it faster, and nothing else."""
        key = (tuple(prompt_token_ids), params, sample_index)
        if key not in self._answers:
            self._answers[key] = self._compute(*key, guess)
        return self._answers[key]

    def _compute(
        self, prompt: tuple[int, ...], params: SamplingParams, sample_index: int, guess: Sequence[int]
    ) -> ReferenceAnswer:
        prompt_token_ids = list(prompt)
        if self._model is None:
            self._model = load_reference(self.folder)
        plain = SamplingParams(max_tokens=params.max_tokens, temperature=0.0, ignore_eos=True)
        if params == plain:
            # Without the sampler: what is greedy needs none of our code.
            return greedy_answer(self._model, prompt_token_ids, params.max_tokens, guess=guess)
        return chosen_answer(self._model, prompt_token_ids, params, sample_index, guess)


@dataclass(slots=True)
class Tally:
    """All comparisons of a session, by name."""

    lines: list[str] = field(default_factory=list)
    num_sequences: int = 0
    num_near_ties: int = 0

    def add(self, name: str, comparison: Comparison, totals: EngineTotals) -> None:
        """Note a comparison, then fail if it is not within the margin rule."""
        self.num_sequences += comparison.num_sequences
        self.num_near_ties += len(comparison.near_ties)
        self.lines.append(
            f"{name:<48} sequences {comparison.num_sequences:>3}  equal {comparison.num_equal:>3}  "
            f"near_ties {len(comparison.near_ties)}  tokens {comparison.num_tokens:>5}  "
            f"close decisions {comparison.num_close_decisions}  | steps {totals.num_steps:>4}  "
            f"chunks {totals.num_prefill_chunks:>4}  recomputed {totals.num_preemptions_recompute:>3}  "
            f"swapped {totals.num_preemptions_swap:>3}"
        )
        comparison.check()


_TALLY = pytest.StashKey[Tally]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_TALLY] = Tally()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    tally = config.stash[_TALLY]
    if tally.lines:
        terminalreporter.section("model oracle")
        terminalreporter.write_line("\n".join(tally.lines))
        terminalreporter.write_line(f"{tally.num_near_ties} near ties in {tally.num_sequences} sequences")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Torch's threads wait for each other in busy loops: beside any other load, two are many times slower than one.
    Of a module, so that its own fixtures have it too."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def tally(pytestconfig: pytest.Config) -> Iterator[Tally]:
    counted = pytestconfig.stash[_TALLY]
    yield counted
    # Of everything that was compared: a single comparison may hold fewer than a hundred sequences.
    share = f"{counted.num_near_ties} near ties in {counted.num_sequences} sequences"
    assert counted.num_near_ties <= MAX_NEAR_TIE_SHARE * counted.num_sequences, share


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], OracleModel]:
    models: dict[str, OracleModel] = {}

    def get(family: str) -> OracleModel:
        if family not in models:
            models[family] = OracleModel(save_tiny_model(tmp_path_factory.mktemp(family), family))
        return models[family]

    return get


@pytest.fixture(scope="session")
def demo_model() -> OracleModel:
    return OracleModel(ensure_demo_model())


@pytest.fixture(scope="session")
def demo_prompts(demo_model: OracleModel) -> list[list[int]]:
    """40 prompts of 5 to 1,500 tokens, mixed in length as traffic is."""
    return real_prompts(Tokenizer(demo_model.folder).encode)
