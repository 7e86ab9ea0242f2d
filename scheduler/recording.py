"""The recorder: every input of a scheduler and a digest of its decisions, as JSON lines. Never tokens or text.

Owns the file and the writing side of its format; `recording_reader.py` is the reading side. Tenants become numbers,
block keys short hashes. A disk that fills up ends the recording, not the engine.
"""

import json
import logging
from base64 import b64encode
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, TextIO

from kv_cache import BlockKey, BlockManager
from scheduler.arrivals import arrival_of
from scheduler.config import SchedulerConfig
from scheduler.decisions import DecisionDigest
from scheduler.limits import StepLimits
from scheduler.outputs import SchedulerOutputs, SequenceEnd
from scheduler.records import StepRecord
from scheduler.requests import Request
from scheduler.sequence import Sequence, SequenceGroup, SequenceStatus
from scheduler.step import Step

logger = logging.getLogger(__name__)

FORMAT = "stallfree-recording"
FORMAT_VERSION = 1
#: of a block key; in base64 12 characters
KEY_DIGEST_BYTES = 9
BUFFER_BYTES = 1 << 18
#: a busy engine that is killed loses at most what so many seconds recorded
FLUSH_PERIOD_S = 1.0


class Recorder:
    """Written to by one `Scheduler`, in the order of its calls. `time` of a verb without one is that of the last
    step's beginning or end."""

    def __init__(self, path: str) -> None:
        """Makes `path`, or, if that is there, the first free one of `path.1`, `path.2`, ...: what several workers,
        or a worker's replacement, record never overwrites anything. Raises OSError."""
        self._file: TextIO | None
        self._file, self.path = _create(path)
        self._tenants: dict[str, str] = {}
        self._now = 0.0
        self._flushed_s = 0.0
        self._digest = DecisionDigest(1)

    def begin(self, config: SchedulerConfig, blocks: BlockManager) -> None:
        """The header: what a scheduler like this one is made from."""
        self._digest = DecisionDigest(blocks.block_size)
        self._write(
            {
                "format": FORMAT,
                "version": FORMAT_VERSION,
                "scheduler": {
                    "max_num_batched_tokens": config.max_num_batched_tokens,
                    "max_num_seqs": config.max_num_seqs,
                    "max_model_len": config.max_model_len,
                    "scheduler_policy": config.policy.value,
                    "preemption_mode": config.preemption_mode.value,
                    "queue_policy": config.queue_policy.value,
                    "chunk_alignment": config.chunk_alignment,
                    "max_num_partial_prefills": config.max_num_partial_prefills,
                    "long_prefill_threshold": config.long_prefill_threshold,
                    "min_prefill_tokens": config.min_prefill_tokens,
                    "target_itl_ms": config.target_itl_ms,
                    "priority_aging_s": config.priority_aging_s,
                    "tenant_weights": {self._tenant(name): w for name, w in config.tenant_weights.items()},
                },
                "block_size": blocks.block_size,
                "num_device_blocks": blocks.num_device_blocks,
                "num_host_blocks": blocks.num_host_blocks,
                "watermark": blocks.watermark,
            }
        )
        self.flush()

    # -- inputs --------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Before it is known whether the request is refused: a replay finds that out by itself."""
        arrival = arrival_of(request)
        self._now = max(self._now, arrival.arrival_s)
        line: dict[str, Any] = {
            "add": arrival.request_id,
            "time": arrival.arrival_s,
            "num_prompt_tokens": arrival.num_prompt_tokens,
            "max_tokens": arrival.max_tokens,
            "max_num_tokens": arrival.max_num_tokens,
        }
        optional = {
            "min_tokens": arrival.min_tokens,
            "num_samples": arrival.num_samples if arrival.num_samples > 1 else 0,
            "is_beam": arrival.is_beam,
            "priority": arrival.priority,
            "tenant": self._tenant(arrival.tenant) if arrival.tenant else "",
            "outputs": [[output.num_tokens, output.like, output.num_common] for output in arrival.outputs],
            "block_keys": [[_short(key) for key in keys] for keys in arrival.block_keys],
            "ended_samples": list(arrival.ended_samples),
        }
        self._write(line | {name: value for name, value in optional.items() if value})

    def end(self, request_id: str, status: SequenceStatus) -> None:
        self._write({"end": request_id, "time": self._now, "status": status.value})

    def finish(self, request_id: str, index: int) -> None:
        self._write({"finish": request_id, "time": self._now, "index": index})

    def set_rates(self, prefill_tokens_per_s: float, swap_blocks_per_s: float) -> None:
        self._write({"rates": [prefill_tokens_per_s, swap_blocks_per_s]})

    def set_limits(self, limits: StepLimits) -> None:
        self._write({"limits": [limits.max_num_batched_tokens, limits.max_num_seqs, limits.target_itl_ms]})

    def update(
        self,
        step: Step,
        samples: Mapping[int, list[int]],
        now: float,
        block_keys: Mapping[int, list[BlockKey]],
        beams: Mapping[str, list[tuple[int, int]]],
        groups: Mapping[str, SequenceGroup],
    ) -> None:
        """Before the step is settled. A sample of one token that ends nothing leaves no trace."""
        self._now = now
        counts: list[list[int]] = []
        same: list[list[int]] = []
        for group, row_seq, _, _, do_sample in step.rows:
            if not do_sample or group.is_beam or row_seq.status.is_finished:
                continue
            for seq in [row_seq] if group.is_forked else group.sequences:
                token_ids = samples[seq.seq_id]
                num_tokens, is_stopped = _kept(seq, token_ids, group)
                if is_stopped or num_tokens != 1:
                    counts.append([seq.seq_id, num_tokens, int(is_stopped)])
                if len(group.sequences) > 1 and (likeness := _likeness(group, seq, row_seq, samples)):
                    same.append(likeness)
        line: dict[str, Any] = {"update": step.outputs.step_id, "time": now}
        if counts:
            line["counts"] = counts
        if same:
            line["same"] = same
        if block_keys:
            line["block_keys"] = {seq_id: [_short(key) for key in keys] for seq_id, keys in block_keys.items()}
        if beams:
            line["beams"] = {
                request_id: _places(groups[request_id], choices)
                for request_id, choices in beams.items()
                if request_id in groups
            }
        self._write(line)

    # -- decisions -----------------------------------------------------------------------------------------------

    def note_ends(self, ends: list[SequenceEnd]) -> None:
        self._digest.note_ends(ends)

    def schedule(self, outputs: SchedulerOutputs, record: StepRecord) -> None:
        """After the step was planned."""
        self._now = record.time_s
        self._write({"schedule": record.time_s, "digest": self._digest.of_step(outputs, record)})
        if record.time_s >= self._flushed_s + FLUSH_PERIOD_S:
            self._flushed_s = record.time_s
            self.flush()

    # -- the file ------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        if self._file is not None:
            try:
                self._file.flush()
            except OSError as error:
                self._give_up(error)

    def close(self) -> None:
        """Nothing is recorded any more."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            try:
                self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        logger.error("recording to %s has stopped: %s", self.path, error)
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError:
                logger.debug("%s was closed with unwritten lines", self.path)

    def _tenant(self, name: str) -> str:
        return self._tenants.setdefault(name, f"t{len(self._tenants)}")


def _create(path: str) -> tuple[TextIO, str]:
    name, number = path, 0
    while True:
        try:
            return open(name, "x", buffering=BUFFER_BYTES, encoding="utf-8"), name
        except FileExistsError:
            number += 1
            name = f"{path}.{number}"


def _short(key: BlockKey) -> str:
    return b64encode(blake2b(key, digest_size=KEY_DIGEST_BYTES).digest()).decode()


def _kept(seq: Sequence, token_ids: list[int], group: SequenceGroup) -> tuple[int, bool]:
    """How many of the tokens are appended before a stop token ends the sequence, that one included, and whether one
    does. Limits on the length are numbers of the request: a replay applies them itself."""
    rules = group.stop_rules
    num_output = seq.num_output_tokens
    for count, token_id in enumerate(token_ids, 1):
        if token_id in rules.stop_token_ids and num_output + count > rules.min_tokens:
            return count, True
    return len(token_ids), False


def _likeness(
    group: SequenceGroup, seq: Sequence, row_seq: Sequence, samples: Mapping[int, list[int]]
) -> list[int] | None:
    """[sequence, sibling, count]: the first `count` new tokens are those that the sibling has at the same places.

    Siblings share blocks as far as they begin alike, so a replay has to know how far they do; one whose earlier tokens
    differ does not count.
    """
    own, place = samples[seq.seq_id], len(row_seq.token_ids)
    before = row_seq.token_ids[seq.num_prompt_tokens : place]
    best: list[int] | None = None
    for sibling in group.sequences:
        if sibling is seq or (group.is_forked and sibling.token_ids[seq.num_prompt_tokens : place] != before):
            continue
        known = sibling.token_ids[place : place + len(own)]
        if not known and sibling.index < seq.index and (not group.is_forked or len(sibling.token_ids) == place):
            known = samples.get(sibling.seq_id, [])
        count = 0
        while count < min(len(own), len(known)) and own[count] == known[count]:
            count += 1
        if count and (best is None or count > best[2]):
            best = [seq.seq_id, sibling.seq_id, count]
    return best


def _places(group: SequenceGroup, choices: list[tuple[int, int]]) -> list[int]:
    place_of = {seq.seq_id: place for place, seq in enumerate(group.live)}
    return [place_of[parent_id] for parent_id, _ in choices]
