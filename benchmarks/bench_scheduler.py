"""What planning and settling one step costs for each running answer, without a model. Prints one JSON line a case.

`waiting` shows that the cost does not grow with the queue. The best of several rounds is printed: noise only adds.
"""

import json
import time

from kv_cache import BlockManager
from scheduler import Scheduler, SchedulerConfig, StopRules

NUM_ROUNDS = 5
NUM_STEPS = 60
BLOCK_SIZE = 16
MAX_MODEL_LEN = 4096
CASES = [(32, 0), (256, 0), (1024, 0), (256, 10), (256, 10_000)]


def scheduler_with(num_running: int, num_waiting: int) -> Scheduler:
    """All `num_running` answers decode; no sequence slot is left for those who wait."""
    blocks = BlockManager(BLOCK_SIZE, num_running * MAX_MODEL_LEN // BLOCK_SIZE)
    config = SchedulerConfig(
        max_num_batched_tokens=max(2048, num_running), max_num_seqs=num_running, max_model_len=MAX_MODEL_LEN
    )
    scheduler = Scheduler(config, blocks)
    rules = StopRules(MAX_MODEL_LEN, MAX_MODEL_LEN)
    for number in range(num_running + num_waiting):
        # The lengths differ, so that blocks are filled in different steps.
        scheduler.add(f"request-{number}", [1] * (1 + number % BLOCK_SIZE), rules, 0.0)
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
        began_s = time.thread_time()
        scheduler.update(outputs.step_id, samples, 0.0)
        spent_s += time.thread_time() - began_s
    return spent_s


def main() -> None:
    for num_running, num_waiting in CASES:
        scheduler = scheduler_with(num_running, num_waiting)
        best_s = min(run(scheduler, NUM_STEPS) for _ in range(NUM_ROUNDS))
        us = best_s / NUM_STEPS / num_running * 1e6
        print(json.dumps({"running": num_running, "waiting": num_waiting, "us_per_sequence": round(us, 2)}), flush=True)


if __name__ == "__main__":
    main()
