"""The oracle sees what it is there to see: each fault planted below the engine changes tokens by more than rounding."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kv_cache.tensor_pool import BlockPairs, TensorPool
from tests.oracle.compare import Comparison, compare_answers
from tests.oracle.configurations import Configuration, Workload
from tests.oracle.conftest import OracleModel
from tests.oracle.engine_runs import greedy, run_engine
from tests.oracle.prompts import tiny_prompts
from worker.model import CausalModel

pytestmark = pytest.mark.oracle

LENGTHS = (5, 90, 17, 60, 33, 15)
WORKLOAD = Workload(LENGTHS, max_tokens=32, block_size=16, max_model_len=122)
SWAP = Configuration("swap", 48, preemption="swap")
CHUNKED = Configuration("chunked", 24)


def _compare(model: OracleModel, configuration: Configuration) -> Comparison:
    params = greedy(WORKLOAD.max_tokens)
    prompts = tiny_prompts(LENGTHS)
    # The plain path, since faults are planted in it.
    config = replace(configuration.engine_config(str(model.folder), WORKLOAD), attention_backend="torch_sdpa")
    run = run_engine(config, prompts, [params] * len(prompts))
    configuration.check_it_did_its_work(WORKLOAD, run.totals, run.records)
    return compare_answers([model.answer(prompt, params) for prompt in prompts], run.answers)


@pytest.mark.parametrize("configuration", [SWAP, CHUNKED], ids=lambda configuration: configuration.name)
def test_without_a_fault_all_answers_are_equal(
    configuration: Configuration, tiny_model: Callable[[str], OracleModel]
) -> None:
    assert _compare(tiny_model("llama"), configuration).num_equal == len(LENGTHS)


def test_a_swapped_block_that_is_not_brought_back_is_seen(
    tiny_model: Callable[[str], OracleModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    swap = TensorPool.swap

    def lose_one(pool: TensorPool, out_pairs: BlockPairs, in_pairs: BlockPairs, copy_pairs: BlockPairs) -> None:
        swap(pool, out_pairs, in_pairs[1:], copy_pairs)

    monkeypatch.setattr(TensorPool, "swap", lose_one)
    assert _compare(tiny_model("llama"), SWAP).faults


def test_positions_that_start_anew_in_each_chunk_are_seen(
    tiny_model: Callable[[str], OracleModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = CausalModel.forward

    def wrap_positions(model: CausalModel, input_ids: torch.Tensor, positions: torch.Tensor, *rest: object) -> object:
        return forward(model, input_ids, positions % CHUNKED.budget, *rest)

    monkeypatch.setattr(CausalModel, "forward", wrap_positions)
    assert _compare(tiny_model("llama"), CHUNKED).faults
