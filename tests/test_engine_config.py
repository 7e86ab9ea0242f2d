import pytest

from scheduler.config import PreemptionMode, SchedulerPolicy
from worker.byte_sizes import parse_bytes
from worker.config import (
    ConfigError,
    EngineConfig,
    ResolvedConfig,
    check_engine_config,
    resolve_engine_config,
)

BLOCK_BYTES = 1000
MODEL_LEN = 2048
AMPLE_BYTES = BLOCK_BYTES * 1000


def resolve(device_type: str = "cpu", cache_memory_bytes: int = AMPLE_BYTES, **options: object) -> ResolvedConfig:
    return resolve_engine_config(
        EngineConfig(**options),
        device_type=device_type,
        model_max_len=MODEL_LEN,
        block_bytes=BLOCK_BYTES,
        cache_memory_bytes=cache_memory_bytes,
    )


def refusal(**options: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        resolve(**options)
    assert caught.value.option in str(caught.value)
    return caught.value


def test_defaults_on_the_cpu_suit_a_slow_machine() -> None:
    resolved = resolve("cpu")
    assert resolved.max_num_batched_tokens == 256
    assert resolved.max_num_seqs == 256
    assert resolved.chunk_alignment == resolved.block_size == 16
    assert resolved.max_model_len == MODEL_LEN
    assert resolved.num_device_blocks == 1000
    assert resolved.num_host_blocks == 1000
    assert resolve("cpu", preemption_mode="recompute").num_host_blocks == 0
    assert resolved.scheduler_policy is SchedulerPolicy.CHUNKED_PREFILL
    assert resolved.preemption_mode is PreemptionMode.AUTO
    assert resolved.notes == ()


def test_defaults_on_cuda_suit_its_kernels() -> None:
    resolved = resolve("cuda")
    assert (resolved.max_num_batched_tokens, resolved.max_num_seqs, resolved.chunk_alignment) == (2048, 256, 256)


def test_the_default_policy_has_a_budget_for_the_longest_prompt() -> None:
    resolved = resolve(scheduler_policy="default", max_model_len=1024)
    assert resolved.max_num_batched_tokens == 1024
    assert resolved.scheduler_config().policy is SchedulerPolicy.DEFAULT


def test_the_default_policy_refuses_a_budget_below_the_model_length() -> None:
    error = refusal(scheduler_policy="default", max_num_batched_tokens=256, max_model_len=1024)
    assert error.option == "max_num_batched_tokens"
    assert "256" in str(error)
    assert "1024" in str(error)


SIZES = [
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "block_size",
    "num_device_blocks",
    "num_host_blocks",
    "kv_cache_memory",
    "chunk_alignment",
    "num_threads",
    "cuda_graph_memory",
]


@pytest.mark.parametrize("option", SIZES)
@pytest.mark.parametrize("size", [0, -5])
def test_a_size_that_is_zero_or_negative_is_refused_by_name(option: str, size: int) -> None:
    with pytest.raises(ConfigError, match=f"{option}.*{size}") as caught:
        check_engine_config(EngineConfig(**{option: size}))
    assert caught.value.option == option


@pytest.mark.parametrize("option", ["max_num_partial_prefills", "long_prefill_threshold", "min_prefill_tokens"])
def test_a_negative_limit_is_refused_and_zero_switches_it_off(option: str) -> None:
    check_engine_config(EngineConfig(**{option: 0}))
    with pytest.raises(ConfigError) as caught:
        check_engine_config(EngineConfig(**{option: -1}))
    assert caught.value.option == option


@pytest.mark.parametrize("option", ["target_itl_ms", "gpu_memory_utilization", "priority_aging_s"])
@pytest.mark.parametrize("value", ["1", True, None])
def test_a_number_that_is_none_is_refused(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match="number") as caught:
        check_engine_config(EngineConfig(**{option: value}))
    assert caught.value.option == option


def test_a_tenants_weight_that_is_no_number_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^tenant_weights: .*'a' must be a number above 0, got True"):
        check_engine_config(EngineConfig(tenant_weights={"a": True}))


@pytest.mark.parametrize("value", ["16", 1.5, True])
def test_a_size_that_is_no_whole_number_is_refused(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        check_engine_config(EngineConfig(max_num_seqs=value))
    assert caught.value.option == "max_num_seqs"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("dtype", "int8"),
        ("device", "tpu"),
        ("scheduler_policy", "fastest"),
        ("preemption_mode", "drop"),
        ("queue_policy", "lifo"),
        ("priority_aging_s", 0.0),
        ("tenant_weights", {"a": 0.0}),
        ("attention_backend", "flash"),
        ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", 1.1),
        ("tensor_parallel_size", 2),
        ("quantization", "awq"),
        ("enable_lora", True),
        ("max_model_len", 1),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_before_any_model_is_known(option: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        check_engine_config(EngineConfig(**{option: value}))
    assert caught.value.option == option


def test_a_budget_below_the_number_of_sequences_is_refused_with_both_numbers() -> None:
    error = refusal(max_num_batched_tokens=32, max_num_seqs=64)
    assert error.option == "max_num_batched_tokens"
    assert "32" in str(error)
    assert "max_num_seqs 64" in str(error)


def test_reserved_prefill_tokens_must_fit_beside_the_sequences() -> None:
    error = refusal(max_num_batched_tokens=64, max_num_seqs=40, min_prefill_tokens=25)
    assert error.option == "min_prefill_tokens"
    assert resolve(max_num_batched_tokens=64, max_num_seqs=40, min_prefill_tokens=24).min_prefill_tokens == 24


def test_the_default_number_of_sequences_leaves_room_for_reserved_prefill_tokens() -> None:
    assert resolve(max_num_batched_tokens=64, min_prefill_tokens=24).max_num_seqs == 40


def test_the_default_budget_grows_for_an_explicit_number_of_sequences() -> None:
    resolved = resolve(max_num_seqs=300)
    assert (resolved.max_num_batched_tokens, resolved.max_num_seqs) == (300, 300)


def test_a_small_budget_lowers_the_default_number_of_sequences() -> None:
    assert resolve(max_num_batched_tokens=48).max_num_seqs == 48


def test_a_length_over_the_models_is_refused_with_both_numbers() -> None:
    error = refusal(max_model_len=MODEL_LEN + 1)
    assert error.option == "max_model_len"
    assert str(MODEL_LEN) in str(error)
    assert str(MODEL_LEN + 1) in str(error)


def test_a_pool_holds_one_longest_sequence_and_the_null_block_or_is_refused() -> None:
    assert resolve(num_device_blocks=9, max_model_len=128).num_device_blocks == 9
    error = refusal(num_device_blocks=8, max_model_len=128)
    assert error.option == "num_device_blocks"
    assert "8 blocks" in str(error)
    assert "128" in str(error)


def test_a_pool_chosen_too_small_for_the_models_own_length_is_refused() -> None:
    assert refusal(num_device_blocks=8).option == "num_device_blocks"
    assert refusal(kv_cache_memory=BLOCK_BYTES * 8).option == "kv_cache_memory"


def test_a_default_pool_too_small_for_the_models_length_cuts_the_length_and_says_so() -> None:
    resolved = resolve(cache_memory_bytes=BLOCK_BYTES * 11 + 999)
    assert resolved.num_device_blocks == 11
    assert resolved.max_model_len == 160
    assert "160" in resolved.notes[0]
    assert str(MODEL_LEN) in resolved.notes[0]


def test_a_default_pool_too_small_for_an_explicit_length_is_refused() -> None:
    assert refusal(cache_memory_bytes=BLOCK_BYTES * 8, max_model_len=128).option == "kv_cache_memory"


def test_a_default_pool_that_holds_nothing_is_refused() -> None:
    assert refusal(cache_memory_bytes=BLOCK_BYTES).option == "kv_cache_memory"


def test_the_pools_size_is_given_once() -> None:
    assert refusal(num_device_blocks=500, kv_cache_memory=BLOCK_BYTES * 500).option == "kv_cache_memory"


def test_swap_mirrors_the_device_pool_on_the_host_unless_told_otherwise() -> None:
    assert resolve(preemption_mode="swap", num_device_blocks=200).num_host_blocks == 200
    assert resolve(preemption_mode="swap", num_device_blocks=200, num_host_blocks=7).num_host_blocks == 7


def test_an_alignment_over_the_budget_is_clamped_so_that_no_chunk_is_floored_to_nothing() -> None:
    assert resolve(chunk_alignment=256, max_num_batched_tokens=128).chunk_alignment == 128
    assert resolve("cuda", max_num_batched_tokens=100).chunk_alignment == 100


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1GiB", 2**30),
        ("512MiB", 2**29),
        ("1.5 gib", 3 * 2**29),
        ("2GB", 2 * 10**9),
        ("64kb", 64000),
        ("123", 123),
        (7, 7),
    ],
)
def test_byte_sizes_are_read_with_their_units(text: str | int, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "1TiBB", "one", "1 2GiB", "nanGiB", "infGiB", "0x10"])
def test_what_is_no_byte_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"size|unit"):
        parse_bytes(text)
