"""Workers on a virtual clock behind the real router: the real scheduler, block manager and prefix cache, no model.

Each worker's steps last `step_s`. Every ingress has a registry and a router of its own, as each process has.
"""

from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from deployments import router_state
from deployments.prefix_index import PromptBlocks
from deployments.router import BLOCK_SIZE_KEY, LoadRouter
from deployments.router_state import RouterState
from kv_cache import BlockManager
from scheduler import Request, Scheduler, SchedulerConfig, SchedulerOutputs, SequenceGroup, StopRules
from worker.prefix_keys import PrefixKeys
from worker.types import EngineLoad, EngineRequest, SamplingParams

BLOCK_SIZE = 16
HEARTBEAT_S = 0.5
_MAX_MODEL_LEN = 4096


@dataclass
class Asked:
    """One request: where it went, what its prompt found in the cache."""

    request: EngineRequest
    ingress: "Ingress"
    num_cached_tokens: int | None = None


class Ingress:
    """`choose` sends a request as an ingress process would; `random` in place of the router."""

    def __init__(self, clock: Any, random: Random | None = None) -> None:
        self.state = RouterState(clock)
        self._random = random
        self._router = LoadRouter.__new__(LoadRouter)
        self._router.initialize_state()
        self._keys = PrefixKeys(b"the ingress's own", BLOCK_SIZE)

    def choose(self, workers: list["Worker"], request: EngineRequest, monkeypatch: pytest.MonkeyPatch) -> "Worker":
        if self._random is not None:
            return self._random.choice(workers)
        monkeypatch.setattr(router_state, "ROUTER_STATE", self.state)
        keys = self._keys.extend(self._keys.root(), request.prompt_token_ids)
        self.state.open(request.request_id, blocks=PromptBlocks(keys, BLOCK_SIZE))
        asked = SimpleNamespace(
            args=[request], kwargs={}, routing_context=SimpleNamespace(should_backoff=False)
        )
        choosing = self._router.choose_replicas(workers, asked)  # type: ignore[arg-type]
        with pytest.raises(StopIteration) as done:
            choosing.send(None)  # it waits for nothing
        return done.value.value[0][0]


class Worker:
    """As much of Serve's `RunningReplica` as a router looks at, and the worker behind it."""

    def __init__(self, name: str, step_s: float, num_blocks: int, num_batched_tokens: int) -> None:
        self.replica_id = SimpleNamespace(unique_id=name)
        self.replica_metadata = {BLOCK_SIZE_KEY: BLOCK_SIZE}
        self.step_s = step_s
        self.next_step_s = 0.0
        #: for each step the number of requests held, and all requests that came
        self.num_held: list[int] = []
        self.asked: list[Asked] = []
        self.num_computed_tokens = 0
        self._blocks = BlockManager(BLOCK_SIZE, num_blocks, 0)
        config = SchedulerConfig(num_batched_tokens, 64, _MAX_MODEL_LEN)
        self._scheduler = Scheduler(config, self._blocks)
        self._keys = PrefixKeys(b"the workers' own", BLOCK_SIZE)
        self._open: dict[str, tuple[Asked, SequenceGroup]] = {}
        self._heartbeat_s = 0.0

    def submit(self, asked: Asked, now: float) -> None:
        request = asked.request
        keys = self._keys.extend(self._keys.root(), request.prompt_token_ids)
        rules = StopRules(request.params.max_tokens, _MAX_MODEL_LEN)
        group = self._scheduler.add(
            Request(request.request_id, request.prompt_token_ids, rules, now, block_keys=[keys])
        )
        self._open[request.request_id] = (asked, group)
        self.asked.append(asked)

    @property
    def is_idle(self) -> bool:
        return not self._open

    def step(self, now: float) -> None:
        self.num_held.append(len(self._open))
        self.next_step_s = now + self.step_s
        outputs = self._scheduler.schedule(now)
        if outputs.is_empty:
            return
        self.num_computed_tokens += outputs.num_batched_tokens
        samples = self._samples(outputs)
        ends = self._scheduler.update(outputs.step_id, samples, self.next_step_s)
        is_heartbeat = now - self._heartbeat_s >= HEARTBEAT_S
        if is_heartbeat:
            self._heartbeat_s = now
        load = self._load()
        sampled = {chunk.request_id for chunk in outputs.chunks if chunk.do_sample}
        for request_id in self._open if is_heartbeat else sampled:
            self._report(request_id, load, has_token=request_id in sampled)
        for end in ends:
            asked, _ = self._open.pop(end.request_id)
            asked.ingress.state.close(end.request_id)

    def _samples(self, outputs: SchedulerOutputs) -> dict[int, list[int]]:
        return {chunk.seq_id: [1] for chunk in outputs.chunks if chunk.do_sample}

    def _report(self, request_id: str, load: EngineLoad, *, has_token: bool) -> None:
        asked, group = self._open[request_id]
        state = asked.ingress.state
        is_first = has_token and asked.num_cached_tokens is None
        if is_first:
            asked.num_cached_tokens = group.num_cached_tokens
        if state.num_open_requests:
            state.report(request_id, self.replica_id.unique_id, load)
            if is_first:
                state.first_token(request_id, group.num_cached_tokens)

    def _load(self) -> EngineLoad:
        queues = self._scheduler.queues
        return EngineLoad(
            len(queues.waiting),
            len(queues.running),
            len(queues.swapped),
            self._scheduler.num_queued_tokens(),
            self._blocks.num_free_device_blocks,
            self._blocks.num_used_device_blocks,
            reference_step_s=self.step_s,
        )


@dataclass
class Cluster:
    """Requests come at `rate_per_s`, at random times, each at a random ingress."""

    workers: list[Worker]
    rng: Random
    monkeypatch: pytest.MonkeyPatch
    is_random: bool = False
    num_ingresses: int = 1
    now_s: float = 0.0
    ingresses: list[Ingress] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ingresses = [
            Ingress(lambda: self.now_s, self.rng if self.is_random else None) for _ in range(self.num_ingresses)
        ]

    def serve(self, prompts: list[list[int]], rate_per_s: float, max_tokens: int) -> None:
        """Until all are answered."""
        arrival_s = 0.0
        for number, prompt in enumerate(prompts):
            arrival_s += self.rng.expovariate(rate_per_s)
            self._run_until(arrival_s)
            self.now_s = arrival_s
            request = EngineRequest(f"r{number}", prompt, SamplingParams(max_tokens=max_tokens))
            ingress = self.rng.choice(self.ingresses)
            ingress.choose(self.workers, request, self.monkeypatch).submit(Asked(request, ingress), self.now_s)
        while not all(worker.is_idle for worker in self.workers):
            self._run_until(self.now_s + 1.0)

    def _run_until(self, end_s: float) -> None:
        while (worker := min(self.workers, key=lambda worker: worker.next_step_s)).next_step_s < end_s:
            self.now_s = max(self.now_s, worker.next_step_s)
            worker.step(worker.next_step_s)
        self.now_s = end_s

    @property
    def cached_share(self) -> float:
        """Of all prompt tokens, those that were not computed."""
        asked = [asked for worker in self.workers for asked in worker.asked]
        return sum(one.num_cached_tokens or 0 for one in asked) / sum(
            len(one.request.prompt_token_ids) for one in asked
        )

    @property
    def spread_of_load(self) -> float:
        """The most requests that a worker held on average, over the mean of all."""
        means = [sum(worker.num_held) / len(worker.num_held) for worker in self.workers]
        return max(means) * len(means) / sum(means)
