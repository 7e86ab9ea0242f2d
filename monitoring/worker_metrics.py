"""What a worker counts: steps, chunks, preemptions, swaps, queues and blocks, read from its step records.

Knows nothing of requests' texts or latencies, and makes no step wait: whoever holds it folds between steps.
"""

from collections.abc import Mapping

from monitoring.accumulator import Accumulator, Snapshot
from scheduler.records import StepRecord


class WorkerMetrics:
    """Series of the worker with this rank. `last_step_id` is the newest step folded: read on from there. `block_size`
    is in tokens, `block_bytes` what one block holds of all layers."""

    def __init__(
        self, model: str, worker: int, last_step_id: int = -1, *, block_size: int = 1, block_bytes: int = 0
    ) -> None:
        self._accumulator = Accumulator({"model": model, "worker": str(worker)})
        self.last_step_id = last_step_id
        self._block_size = block_size
        self._block_bytes = block_bytes

    def fold(self, records: list[StepRecord]) -> None:
        """Count each step of `records` (oldest first) once. Steps still running at the end of the list are
        left for the next call; steps up to `last_step_id` were counted, so overlapping lists do no harm."""
        num_ended = len(records)
        while num_ended and records[num_ended - 1].duration_s is None:
            num_ended -= 1
        for record in records[:num_ended]:
            if record.step_id > self.last_step_id:
                self._fold_step(record)
                self.last_step_id = record.step_id

    def _fold_step(self, record: StepRecord) -> None:
        count = self._accumulator
        count.observe("stallfree_step_tokens", record.num_batched_tokens)
        if record.duration_s is not None:
            count.observe("stallfree_step_seconds", record.duration_s)
            count.set("stallfree_governor_margin", record.governor_margin)
        self._fold_work(record)
        self._fold_waits(record)
        self._fold_blocks(record)
        for preemption in record.preemptions:
            count.inc("stallfree_preemptions_total", 1, preemption.mode)
            count.inc("stallfree_preemption_reasons_total", 1, preemption.reason)
            count.inc("stallfree_discarded_tokens_total", preemption.num_discarded_tokens)
        count.inc("stallfree_itl_target_violations_total", record.is_over_target)
        count.set("stallfree_step_token_budget", record.max_num_batched_tokens)

    def _fold_work(self, record: StepRecord) -> None:
        """What the step ran of what its budget allowed, and for how long."""
        count = self._accumulator
        kind = _step_kind(record)
        count.inc("stallfree_steps_total", 1, kind)
        count.inc("stallfree_step_kind_seconds_total", record.duration_s or 0.0, kind)
        count.inc("stallfree_budget_tokens_total", record.max_num_batched_tokens)
        count.inc("stallfree_scheduled_tokens_total", record.num_prefill_tokens, "prefill")
        count.inc("stallfree_scheduled_tokens_total", record.num_batched_tokens - record.num_prefill_tokens, "decode")
        for chunk in record.prefill_chunks:
            count.observe("stallfree_prefill_chunk_tokens", chunk.end - chunk.start)
            count.inc("stallfree_partial_prefill_chunks_total", not chunk.completes)

    def _fold_waits(self, record: StepRecord) -> None:
        if record.waiting_reason is not None:
            self._accumulator.inc("stallfree_blocked_steps_total", 1, record.waiting_reason.value)
        if record.swapped_reason is not None:
            self._accumulator.inc("stallfree_blocked_swapped_steps_total", 1, record.swapped_reason.value)

    def _fold_blocks(self, record: StepRecord) -> None:
        """Blocks that were moved, and those that the prefix cache was asked for."""
        count = self._accumulator
        for direction, num_blocks in (("in", record.num_blocks_swapped_in), ("out", record.num_blocks_swapped_out)):
            count.inc("stallfree_swapped_blocks_total", num_blocks, direction)
            count.inc("stallfree_swap_bytes_total", num_blocks * self._block_bytes, direction)
        count.inc("stallfree_swap_seconds_total", record.swap_s)
        count.inc("stallfree_prefix_cache_queries_total", record.num_blocks_queried)
        count.inc("stallfree_prefix_cache_hits_total", record.num_blocks_hit)
        count.inc("stallfree_prefix_cache_query_tokens_total", record.num_blocks_queried * self._block_size)
        count.inc("stallfree_prefix_cache_hit_tokens_total", record.num_blocks_hit * self._block_size)

    def set_load(
        self,
        *,
        num_waiting: int,
        num_running: int,
        num_swapped: int,
        num_used_device_blocks: int,
        num_used_host_blocks: int,
        num_cached_device_blocks: int,
    ) -> None:
        """The worker as it is now, not as it was at its last step: cancels change it between steps."""
        gauge = self._accumulator.set
        gauge("stallfree_num_requests_waiting", num_waiting)
        gauge("stallfree_num_requests_running", num_running)
        gauge("stallfree_num_requests_swapped", num_swapped)
        gauge("stallfree_kv_blocks_used", num_used_device_blocks, "device")
        gauge("stallfree_kv_blocks_used", num_used_host_blocks, "host")
        gauge("stallfree_kv_blocks_cached", num_cached_device_blocks)

    def set_pool_sizes(self, *, num_device_blocks: int, num_host_blocks: int) -> None:
        """Once, when the engine is there: all blocks of each pool, held or not."""
        self._accumulator.set("stallfree_kv_blocks", num_device_blocks, "device")
        self._accumulator.set("stallfree_kv_blocks", num_host_blocks, "host")

    def set_swap_bandwidth(self, *, out_bytes_per_s: float, in_bytes_per_s: float) -> None:
        """Once, as it was measured at start."""
        self._accumulator.set("stallfree_swap_bytes_per_second", round(out_bytes_per_s), "out")
        self._accumulator.set("stallfree_swap_bytes_per_second", round(in_bytes_per_s), "in")

    def tell(self, build_and_options: Mapping[str, str]) -> None:
        """What the worker runs, by the labels of `stallfree_worker_info`."""
        self._accumulator.tell("stallfree_worker_info", build_and_options)

    def set_options(self, values: Mapping[str, float], *, is_refused: bool) -> None:
        """Live options as they hold; whether the newest `user_config` was refused."""
        for option, value in values.items():
            self._accumulator.set("stallfree_live_option", value, option)
        self._accumulator.set("stallfree_user_config_refused", float(is_refused))

    def set_demand(self, *, tokens: float, sequences: float) -> None:
        """What is asked of this worker as shares of what it sustains, in thousandths: what fades must reach zero."""
        self._accumulator.set("stallfree_scaling_demand", round(tokens, 3), "tokens")
        self._accumulator.set("stallfree_scaling_demand", round(sequences, 3), "sequences")

    def snapshot(self) -> Snapshot:
        return self._accumulator.snapshot()


def _step_kind(record: StepRecord) -> str:
    if not record.num_batched_tokens:
        return "none"
    if not record.num_prefill_tokens:
        return "decode"
    return "mixed" if record.num_batched_tokens > record.num_prefill_tokens else "prefill"
