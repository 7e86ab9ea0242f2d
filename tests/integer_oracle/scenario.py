"""Random scenarios: requests, cancels and limits for the scheduler and the block manager."""

from dataclasses import dataclass
from random import Random

from scheduler import PreemptionMode, QueuePolicy, SchedulerConfig, SchedulerPolicy
from tests.integer_oracle.runner import VOCAB_SIZE


@dataclass(slots=True)
class Arrival:
    """`finish`: (sample index, number of tokens) after which somebody outside ends that sample. `num_resumed` (by
    sample): it had so many tokens elsewhere; `ended_samples` had ended there."""

    step: int
    request_id: str
    prompt: list[int]
    max_tokens: int
    num_samples: int = 1
    is_beam: bool = False
    priority: int = 0
    tenant: str = ""
    cancel_step: int | None = None
    finish: tuple[int, int] | None = None
    has_stop_token: bool = True
    num_resumed: tuple[int, ...] = ()
    ended_samples: tuple[int, ...] = ()


@dataclass(slots=True)
class Scenario:
    config: SchedulerConfig
    block_size: int
    num_device_blocks: int
    num_host_blocks: int
    arrivals: list[Arrival]
    num_steps_in_flight: int = 1
    has_prefix_cache: bool = False
    prefill_tokens_per_s: float = 100.0
    swap_blocks_per_s: float = 100.0


def random_scenario(
    rng: Random, policy: SchedulerPolicy, mode: PreemptionMode, queue_policy: QueuePolicy = QueuePolicy.FCFS
) -> Scenario:
    block_size = rng.choice([1, 2, 4, 16])
    max_model_len = rng.choice([24, 60, 120])
    min_blocks = -(-max_model_len // block_size) + 1
    budget = rng.choice([8, 16, 64, 256])
    if policy is SchedulerPolicy.DEFAULT:
        budget = max_model_len + rng.randrange(3) * 40
    config = SchedulerConfig(
        max_num_batched_tokens=budget,
        max_num_seqs=rng.randint(1, min(budget, 12)),
        max_model_len=max_model_len,
        policy=policy,
        preemption_mode=mode,
        queue_policy=queue_policy,
        chunk_alignment=rng.choice([1, 1, 4, 16, 256]),
        max_num_partial_prefills=rng.choice([0, 0, 1, 2]),
        long_prefill_threshold=rng.choice([0, 0, 10, 30]),
        priority_aging_s=rng.choice([1.0, 10.0, 1000.0]),
        tenant_weights={"a": 2.0},
    )
    # Sometimes the pool is smaller than the longest sequence: such requests outgrow it.
    num_device_blocks = max(2, int(min_blocks * rng.choice([0.6, 1.0, 1.0, 1.5, 8.0])))
    shared_prefix = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, max_model_len))]
    arrivals = [random_arrival(rng, f"r{number}", max_model_len, shared_prefix) for number in range(rng.randint(1, 14))]
    return Scenario(
        config,
        block_size,
        num_device_blocks,
        rng.choice([0, 3, num_device_blocks, 4 * num_device_blocks]),
        arrivals,
        num_steps_in_flight=rng.choice([1, 1, 2]),
        has_prefix_cache=rng.random() < 0.5,
        swap_blocks_per_s=rng.choice([20.0, 1000.0]),
    )


def random_arrival(rng: Random, request_id: str, max_model_len: int, shared_prefix: list[int]) -> Arrival:
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, max_model_len))]
    if rng.random() < 0.5:
        prompt = prompt[: rng.randint(1, 12)]
    if rng.random() < 0.4:
        prompt = (shared_prefix[: rng.randint(1, len(shared_prefix))] + prompt)[: max_model_len + 1]
    arrival = Arrival(rng.randrange(30) if rng.random() < 0.7 else 0, request_id, prompt, rng.randint(1, 40))
    arrival.priority = rng.randint(0, 2)
    arrival.tenant = rng.choice("ab")
    if rng.random() < 0.3:
        arrival.num_samples = rng.randint(2, 8)
        arrival.is_beam = rng.random() < 0.3
    if rng.random() < 0.2:
        arrival.cancel_step = arrival.step + rng.randrange(25)
    if arrival.num_samples > 1 and not arrival.is_beam and rng.random() < 0.4:
        arrival.finish = (rng.randrange(arrival.num_samples), rng.randint(1, 10))
    return arrival
