"""What planning and settling one step costs for each running answer, without a model. Prints one JSON line a case.

Step records and prefix cache are on. `waiting` shows that the cost does not grow with the queue, whatever its order.
The best of several rounds is printed: noise only adds.
"""

import json
import time

from benchmarks.options import Parser, run_program
from kv_cache import BlockKey, BlockManager
from scheduler import QueuePolicy, Request, Scheduler, SchedulerConfig, SchedulerOutputs, StopRules

NUM_ROUNDS = 5
NUM_STEPS = 60
BLOCK_SIZE = 16
MAX_MODEL_LEN = 4096
#: running answers, waiting requests, order of the queue
CASES = [
    (32, 0, QueuePolicy.FCFS),
    (256, 0, QueuePolicy.FCFS),
    (1024, 0, QueuePolicy.FCFS),
    *((256, num_waiting, order) for order in QueuePolicy for num_waiting in (10, 10_000)),
]


def scheduler_with(num_running: int, num_waiting: int, order: QueuePolicy) -> Scheduler:
    """All `num_running` answers decode; no sequence slot is left for those who wait."""
    blocks = BlockManager(BLOCK_SIZE, num_running * MAX_MODEL_LEN // BLOCK_SIZE)
    config = SchedulerConfig(
        max_num_batched_tokens=max(2048, num_running),
        max_num_seqs=num_running,
        max_model_len=MAX_MODEL_LEN,
        queue_policy=order,
    )
    scheduler = Scheduler(config, blocks)
    rules = StopRules(MAX_MODEL_LEN, MAX_MODEL_LEN)
    for number in range(num_running + num_waiting):
        # The lengths differ, so that blocks are filled in different steps.
        num_tokens = 1 + BLOCK_SIZE + number % BLOCK_SIZE
        keys = [f"{number}".encode()]
        tenant = f"tenant-{number % 8}"
        scheduler.add(Request(f"request-{number}", [1] * num_tokens, rules, 0.0, tenant=tenant, block_keys=[keys]))
    while any(group.is_prefilling for group in scheduler.queues.running) or scheduler.queues.running.head is None:
        run(scheduler, 1)
    return scheduler


def run(scheduler: Scheduler, num_steps: int) -> float:
    """Seconds of this thread spent in `schedule` and `update`."""
    spent_s = 0.0
    for _ in range(num_steps):
        began_s = time.thread_time()
        outputs = scheduler.schedule(0.0)
        spent_s += time.thread_time() - began_s
        samples = {chunk.seq_id: [5] for chunk in outputs.chunks if chunk.do_sample}
        keys = keys_of_full_blocks(outputs)
        began_s = time.thread_time()
        scheduler.update(outputs.step_id, samples, 0.0, block_keys=keys)
        spent_s += time.thread_time() - began_s
    return spent_s


def keys_of_full_blocks(outputs: SchedulerOutputs) -> dict[int, list[BlockKey]]:
    """A name for each block that the samples of this step fill."""
    ends = ((chunk.seq_id, chunk.start + chunk.token_chunk_size + 1) for chunk in outputs.chunks if chunk.do_sample)
    return {seq_id: [f"{seq_id}-{end}".encode()] for seq_id, end in ends if end % BLOCK_SIZE == 0}


def main() -> None:
    Parser("benchmarks.bench_scheduler", __doc__).parse_args()
    for num_running, num_waiting, order in CASES:
        scheduler = scheduler_with(num_running, num_waiting, order)
        best_s = min(run(scheduler, NUM_STEPS) for _ in range(NUM_ROUNDS))
        us = round(best_s / NUM_STEPS / num_running * 1e6, 2)
        line = {"running": num_running, "waiting": num_waiting, "us_per_sequence": us, "queue_policy": order.value}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    run_program(main)
