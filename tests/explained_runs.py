"""Simulated runs under pressure with what each request's time was spent on, and the same runs without one of them."""

from dataclasses import dataclass, replace
from random import Random
from typing import Any

from kv_cache import BlockManager
from scheduler import PreemptionMode, QueuePolicy, Scheduler, SchedulerConfig
from scheduler.arrivals import Arrival, Work
from scheduler.life_listener import LifeListener
from scheduler.life_report import LifeReport
from scheduler.simulator import Simulator
from scheduler.step_model import StepModel

BLOCK_SIZE = 16
MAX_MODEL_LEN = 8192
#: 5 ms a step, 10 µs a prompt token, 50 µs an answer
MODEL = StepModel(5e-3, 1e-5, 5e-5, 1e-8, 0.0, 1e-6)


@dataclass
class Explained:
    listener: LifeListener
    scheduler: Scheduler

    @property
    def reports(self) -> dict[str, LifeReport]:
        return self.listener.reports

    @property
    def longest_step_s(self) -> float:
        return max(record.duration_s or 0.0 for record in self.scheduler.records.since(0))


def explained(works: list[Work], *, num_blocks: int = 4096, num_host_blocks: int = 0, **options: Any) -> Explained:
    config = SchedulerConfig(
        **{"max_num_batched_tokens": 256, "max_num_seqs": 32, "max_model_len": MAX_MODEL_LEN} | options,
        step_record_capacity=1_000_000,
    )
    blocks = BlockManager(BLOCK_SIZE, num_blocks, num_host_blocks, watermark=0.0)
    scheduler = Scheduler(config, blocks)
    scheduler.set_rates(2e4, 5e4)
    listener = LifeListener(config.queue_policy)
    Simulator(scheduler, BLOCK_SIZE, MODEL, [listener]).run(works)
    return Explained(listener, scheduler)


def work(request_id: str, arrival_s: float, num_prompt_tokens: int, num_output_tokens: int, **fields: Any) -> Work:
    arrival = Arrival(request_id, arrival_s, num_prompt_tokens, num_output_tokens, MAX_MODEL_LEN, **fields)
    return Work(arrival, [num_output_tokens] * arrival.num_samples)


def pressing_works(seed: int, count: int = 300) -> list[Work]:
    """Long prompts among short ones, several classes and tenants, groups, and clients that leave."""
    draw = Random(seed)
    works: list[Work] = []
    now = 0.0
    for number in range(count):
        now += draw.expovariate(30.0)
        is_long = draw.random() < 0.1
        made = work(
            f"r{number}",
            now,
            draw.randint(2000, 4096) if is_long else draw.randint(8, 300),
            draw.randint(1, 120),
            num_samples=draw.choice((1, 1, 1, 1, 3)),
            priority=draw.choice((0, 0, 0, -3, 3)),
            tenant=draw.choice("ab"),
        )
        works.append(replace(made, cancel_s=now + draw.uniform(0.0, 1.0)) if draw.random() < 0.05 else made)
    return works


PRESSURES: dict[str, dict[str, Any]] = {
    "recompute": {"num_blocks": 500},
    "swap": {"num_blocks": 500, "num_host_blocks": 2000, "preemption_mode": PreemptionMode.SWAP},
    "priority": {"num_blocks": 700, "queue_policy": QueuePolicy.PRIORITY, "priority_aging_s": 2.0},
    "fair": {"num_blocks": 700, "queue_policy": QueuePolicy.FAIR},
    "slots": {"max_num_seqs": 8},
}
