"""The rules of one step: order of phases, budget, slots and chunks, for both policies."""

import pytest

from tests.scheduling import Stepper, chunk_sizes, victims


def long_prompt_among_decodes(policy: str, budget: int) -> tuple[Stepper, list[str]]:
    """Eight answers that stream, and a prompt of 4,096 tokens that has just arrived."""
    stepper = Stepper(policy=policy, budget=budget, max_num_seqs=16, max_model_len=8192, block_size=16)
    streaming = [f"d{number}" for number in range(8)]
    for request_id in streaming:
        stepper.add(request_id, 20)
    stepper.steps(3)
    stepper.add("long", 4096, max_tokens=3)
    return stepper, streaming


def test_worked_example_gives_a_long_prompt_what_the_decodes_leave_rounded_to_the_alignment() -> None:
    stepper = Stepper(
        budget=2048,
        max_num_seqs=1600,
        max_model_len=8192,
        block_size=16,
        num_blocks=4000,
        chunk_alignment=256,
    )
    for number in range(1500):
        stepper.add(f"d{number}", 1)
    stepper.step()
    long = stepper.add("long", 4096)
    record = stepper.step()
    assert record.num_decodes == 1500
    assert chunk_sizes(record) == {"long": 512}
    assert record.num_batched_tokens == 1500 + 512
    assert long.num_uncomputed_tokens == 3584


def test_a_long_prompt_never_delays_a_running_decode() -> None:
    stepper, streaming = long_prompt_among_decodes("chunked_prefill", budget=256)
    while stepper.num_output_tokens("long") == 0:
        record = stepper.step()
        assert record.decode_request_ids == streaming
        assert record.prefill_chunks[0].request_id == "long"


def test_under_default_a_long_prompt_makes_every_running_decode_wait() -> None:
    stepper, streaming = long_prompt_among_decodes("default", budget=8192)
    stalled, after = stepper.steps(2)
    assert chunk_sizes(stalled) == {"long": 4096}
    assert stalled.decode_request_ids == []
    assert after.decode_request_ids == [*streaming, "long"]


def test_chunked_prefill_runs_decodes_then_swapped_then_midway_then_new_prompts() -> None:
    stepper = Stepper(mode="swap", budget=64, max_model_len=500, num_blocks=110, num_host_blocks=20, chunk_alignment=32)
    stepper.add("decode", 7)
    stepper.add("filler", 4)
    stepper.add("midway", 400)
    stepper.add("swapped", 20)
    *_, preempting = stepper.steps(3)
    assert victims(preempting) == [("swapped", "swap")]
    stepper.abort("filler")
    stepper.add("new", 4)
    outputs = stepper.plan()
    assert [chunk.request_id for chunk in outputs.chunks] == ["decode", "swapped", "midway", "new"]
    assert [chunk.is_prefill for chunk in outputs.chunks] == [False, False, True, True]


def test_default_runs_whole_prompts_then_decodes_then_swapped_ones() -> None:
    stepper = Stepper(policy="default", mode="swap", num_blocks=6, num_host_blocks=6)
    stepper.add("decode", 7)
    stepper.add("filler", 4)
    stepper.add("swapped", 7)
    prefill, *_, preempting = stepper.steps(3)
    assert chunk_sizes(prefill) == {"decode": 7, "filler": 4, "swapped": 7}
    assert victims(preempting) == [("swapped", "swap")]
    stepper.abort("filler")
    resuming = stepper.step()
    assert resuming.decode_request_ids == ["decode", "swapped"]
    assert resuming.resumed == ["swapped"]


def test_default_never_mixes_prompts_and_decodes() -> None:
    stepper = Stepper(policy="default", max_num_seqs=4)
    for number in range(12):
        stepper.add(f"r{number}", 5 + number, max_tokens=2 + number % 4)
    for record in stepper.run_to_end():
        assert bool(record.prefill_chunks) != bool(record.decode_request_ids)


def test_default_refuses_a_budget_that_cannot_hold_the_longest_prompt() -> None:
    with pytest.raises(ValueError, match=r"max_num_batched_tokens \(63\) must be at least max_model_len \(64\)"):
        Stepper(policy="default", budget=63, max_model_len=64)
    Stepper(policy="default", budget=64, max_model_len=64)
    Stepper(policy="chunked_prefill", budget=16, max_model_len=64)


def test_default_takes_a_prompt_whole_or_not_at_all() -> None:
    stepper = Stepper(policy="default", budget=64)
    stepper.add("first", 40)
    stepper.add("second", 30)
    stepper.add("third", 20)
    first, second, _ = stepper.steps(3)
    assert chunk_sizes(first) == {"first": 40}
    assert chunk_sizes(second) == {"second": 30, "third": 20}


def test_default_counts_running_sequences_before_it_admits_prompts() -> None:
    stepper = Stepper(policy="default", max_num_seqs=2)
    stepper.add("running", 5)
    stepper.step()
    stepper.add("fits", 5)
    stepper.add("waits", 5)
    record = stepper.step()
    assert record.admitted == ["fits"]
    assert stepper.waiting == ["waits"]


@pytest.mark.parametrize(
    ("prompt", "budget", "alignment", "sizes"),
    [
        (40, 64, 16, [40]),  # not truncated: not aligned
        (100, 50, 16, [48, 48, 4]),  # truncated: floored
        (100, 50, 1, [50, 50]),
        (100, 50, 256, [50, 50]),  # flooring would leave nothing
        (129, 128, 256, [128, 1]),
    ],
)
def test_only_a_truncated_chunk_is_aligned_and_never_to_zero(
    prompt: int, budget: int, alignment: int, sizes: list[int]
) -> None:
    stepper = Stepper(budget=budget, max_model_len=200, chunk_alignment=alignment)
    stepper.add("prompt", prompt, max_tokens=1)
    assert [chunk_sizes(record)["prompt"] for record in stepper.run_to_end()] == sizes


def test_the_budget_that_an_aligned_chunk_leaves_goes_to_the_next_prompt() -> None:
    stepper = Stepper(budget=50, max_model_len=200, chunk_alignment=16)
    stepper.add("long", 100)
    stepper.add("short", 2)
    assert chunk_sizes(stepper.step()) == {"long": 48, "short": 2}


def test_only_the_chunk_that_completes_the_known_tokens_samples() -> None:
    stepper = Stepper(budget=16)
    stepper.add("prompt", 40)
    sampled = []
    for _ in range(3):
        outputs = stepper.plan()
        sampled.append([chunk.do_sample for chunk in outputs.chunks])
        stepper.settle(outputs)
    assert sampled == [[False], [False], [True]]
    assert stepper.num_output_tokens("prompt") == 1


def test_generated_tokens_count_as_known_after_a_recompute() -> None:
    stepper = Stepper(num_blocks=4)
    stepper.add("old", 7, max_tokens=4)
    stepper.add("victim", 7, max_tokens=9)
    *_, preempting = stepper.steps(3)
    assert victims(preempting) == [("victim", "recompute")]
    assert stepper.num_output_tokens("victim") == 2
    stepper.steps(2)
    (chunk,) = stepper.scheduler.records.newest.prefill_chunks
    assert (chunk.request_id, chunk.start, chunk.end) == ("victim", 0, 9)
    assert stepper.num_output_tokens("victim") == 3
    stepper.run_to_end()
    assert stepper.num_output_tokens("victim") == 9


def test_a_request_that_brings_its_output_along_computes_all_of_it_before_it_samples() -> None:
    stepper = Stepper(budget=8)
    group = stepper.add("resumed", [7] * 4, 12, outputs=[[5] * 10])
    sampled = []
    for _ in range(2):
        outputs = stepper.plan()
        sampled.append([(c.start, c.token_chunk_size, c.do_sample) for c in outputs.chunks])
        stepper.settle(outputs)
    assert sampled == [[(0, 8, False)], [(8, 6, True)]]
    assert group.sequences[0].num_output_tokens == 11
    stepper.run_to_end()
    assert group.sequences[0].num_output_tokens == 12


def test_decodes_run_oldest_first() -> None:
    stepper = Stepper()
    for request_id in ("c", "a", "b"):
        stepper.add(request_id, 5)
    stepper.step()
    assert stepper.step().decode_request_ids == ["c", "a", "b"]


def test_decodes_come_out_of_the_budget_before_prompts() -> None:
    stepper = Stepper(budget=8, max_num_seqs=8)
    for number in range(7):
        stepper.add(f"d{number}", 1)
    stepper.step()
    stepper.add("prompt", 5)
    record = stepper.step()
    assert record.num_decodes == 7
    assert chunk_sizes(record) == {"prompt": 1}


@pytest.mark.parametrize("policy", ["default", "chunked_prefill"])
def test_nobody_comes_in_beyond_the_sequence_limit(policy: str) -> None:
    stepper = Stepper(policy=policy, max_num_seqs=2)
    for number in range(5):
        stepper.add(f"r{number}", 5, max_tokens=3)
    for record in stepper.run_to_end():
        assert record.num_running <= 2
        assert record.num_decodes + len(record.prefill_chunks) <= 2


def test_a_prompt_that_is_midway_holds_its_sequence_slot() -> None:
    stepper = Stepper(budget=16, max_num_seqs=1, chunk_alignment=10)
    stepper.add("long", 40)
    stepper.add("short", 3)
    for record in stepper.steps(3):
        assert chunk_sizes(record) == {"long": 10}
        assert stepper.waiting == ["short"]


def test_prompts_midway_go_on_oldest_first() -> None:
    stepper = Stepper(budget=50, max_model_len=200, chunk_alignment=32)
    stepper.add("older", 100)
    stepper.add("newer", 100)
    first, second = stepper.steps(2)
    assert list(chunk_sizes(first).items()) == [("older", 32), ("newer", 18)]
    assert list(chunk_sizes(second).items()) == [("older", 32), ("newer", 18)]


def test_min_prefill_tokens_keeps_budget_beside_the_most_decodes() -> None:
    Stepper(budget=64, max_num_seqs=48, min_prefill_tokens=16)
    with pytest.raises(ValueError, match=r"max_num_seqs \(49\) \+ min_prefill_tokens \(16\) must be at most"):
        Stepper(budget=64, max_num_seqs=49, min_prefill_tokens=16)
