"""Order `fair`: tenants share the engine by weight, whoever asks more, and idling earns nothing."""

from collections.abc import Iterator
from random import Random

import pytest

from scheduler.fairness import DECODE_TOKEN_COST, PREFILL_TOKEN_COST, FairShare
from tests.scheduling import Stepper

LONGEST_INPUT = 40
MAX_NUM_SEQS = 8
BLOCK_SIZE = 4
NUM_BLOCKS = 100


class Tenants:
    """Each tenant keeps at least `max_num_seqs` requests outstanding; one of them sends far more than that."""

    def __init__(self, seed: int, weights: dict[str, float], *, num_blocks: int = NUM_BLOCKS, **options: int) -> None:
        self.rng = Random(seed)
        self.stepper = Stepper(
            order="fair",
            budget=48,
            max_num_seqs=MAX_NUM_SEQS,
            num_blocks=num_blocks,
            num_host_blocks=50,
            mode=self.rng.choice(["recompute", "swap"]),
            max_model_len=128,
            tenant_weights=weights,
            **options,
        )
        self.weights = weights
        self.num_sent = 0
        #: weighted tokens served to each tenant: prompt tokens once, and generated ones
        self.served = dict.fromkeys(weights, 0.0)
        #: by tenant, the prompt and output tokens that each outstanding request has had
        self._seen: dict[str, dict[str, tuple[int, int]]] = {tenant: {} for tenant in weights}

    def send(self, tenant: str) -> None:
        self.num_sent += 1
        request_id = f"{tenant}-{self.num_sent}"
        self.stepper.add(
            request_id, self.rng.randint(1, LONGEST_INPUT), max_tokens=self.rng.randint(1, 30), tenant=tenant
        )
        self._seen[tenant][request_id] = (0, 0)

    def num_outstanding(self, tenant: str) -> int:
        return len(self._seen[tenant])

    def step(self) -> None:
        """One step, and what it brought each tenant beyond what it had already had."""
        record = self.stepper.step()
        for request_id in {*record.decode_request_ids, *(chunk.request_id for chunk in record.prefill_chunks)}:
            group = self.stepper.groups[request_id]
            (seq,) = group.sequences
            seen = self._seen[group.tenant]
            num_prompt, num_output = seen[request_id]
            now_prompt = seq.num_prompt_tokens if seq.num_output_tokens else max(num_prompt, seq.num_computed_tokens)
            cost = (now_prompt - num_prompt) * PREFILL_TOKEN_COST
            cost += (seq.num_output_tokens - num_output) * DECODE_TOKEN_COST
            self.served[group.tenant] += cost / self.weights[group.tenant]
            seen[request_id] = (now_prompt, seq.num_output_tokens)
            if request_id in self.stepper.ends:
                del seen[request_id]

    def run_backlogged(self, num_steps: int, arrivals: dict[str, int]) -> Iterator[None]:
        """`arrivals`: requests that a tenant sends in every second step, beside those that keep it backlogged."""
        for number in range(num_steps):
            for tenant in self.weights:
                if number % 2 == 0:
                    for _ in range(arrivals[tenant]):
                        self.send(tenant)
                while self.num_outstanding(tenant) < MAX_NUM_SEQS:
                    self.send(tenant)
            self.step()
            yield


def bound(weights: dict[str, float]) -> float:
    """2 * max(w_p * longest input, w_q * M), M the tokens of the pool; a tenant's weight divides its service."""
    most = max(PREFILL_TOKEN_COST * LONGEST_INPUT, DECODE_TOKEN_COST * NUM_BLOCKS * BLOCK_SIZE)
    return 2 * most / min(weights.values())


@pytest.mark.parametrize("seed", range(6))
def test_backlogged_tenants_never_differ_by_more_than_the_bound_although_one_asks_ten_times_as_much(seed: int) -> None:
    tenants = Tenants(seed, {"modest": 1.0, "greedy": 1.0})
    largest = 0.0
    for _ in tenants.run_backlogged(400, {"modest": 0, "greedy": 5}):
        largest = max(largest, abs(tenants.served["modest"] - tenants.served["greedy"]))
    assert largest <= bound(tenants.weights)
    # Far below it, as only 8 requests run at a time: none brings more than its prompt and its answer.
    assert largest <= 2 * MAX_NUM_SEQS * (LONGEST_INPUT * PREFILL_TOKEN_COST + 30 * DECODE_TOKEN_COST)
    assert min(tenants.served.values()) > 3000


@pytest.mark.parametrize("seed", range(3))
def test_the_bound_holds_where_blocks_are_short_and_answers_are_preempted(seed: int) -> None:
    tenants = Tenants(seed, {"modest": 1.0, "greedy": 1.0}, num_blocks=60)
    num_preemptions = 0
    for _ in tenants.run_backlogged(400, {"modest": 0, "greedy": 5}):
        num_preemptions += len(tenants.stepper.scheduler.records.newest.preemptions)
        assert abs(tenants.served["modest"] - tenants.served["greedy"]) <= bound(tenants.weights)
    assert num_preemptions > 5


@pytest.mark.parametrize("seed", range(3))
def test_under_first_come_first_served_the_bound_would_break(seed: int) -> None:
    """The property can fail: the same arrivals without fairness."""
    tenants = Tenants(seed, {"modest": 1.0, "greedy": 1.0})
    tenants.stepper = Stepper(budget=48, num_blocks=NUM_BLOCKS, max_num_seqs=MAX_NUM_SEQS, max_model_len=128)
    for _ in tenants.run_backlogged(400, {"modest": 0, "greedy": 5}):
        pass
    assert abs(tenants.served["modest"] - tenants.served["greedy"]) > bound(tenants.weights)


@pytest.mark.parametrize("seed", range(4))
def test_weights_of_1_to_3_come_out_as_1_to_3_within_a_tenth(seed: int) -> None:
    tenants = Tenants(seed, {"light": 1.0, "heavy": 3.0})
    for _ in tenants.run_backlogged(1000, {"light": 1, "heavy": 1}):
        pass
    light, heavy = (tenants.served[tenant] * tenants.weights[tenant] for tenant in ("light", "heavy"))
    assert heavy / light == pytest.approx(3.0, rel=0.1)


def test_a_tenant_that_idled_earns_no_credit() -> None:
    tenants = Tenants(0, {"busy": 1.0, "idle": 1.0})
    for _ in range(200):
        while tenants.num_outstanding("busy") < 2 * MAX_NUM_SEQS:
            tenants.send("busy")
        tenants.step()
    before = dict(tenants.served)
    for _ in tenants.run_backlogged(200, {"busy": 0, "idle": 0}):
        pass
    gained = {tenant: tenants.served[tenant] - before[tenant] for tenant in before}
    assert abs(gained["busy"] - gained["idle"]) <= bound(tenants.weights) / 2
    assert gained["busy"] > 1000


def test_a_tenant_that_comes_after_an_idle_engine_starts_level_with_the_last_one_that_was_served() -> None:
    stepper = Stepper(order="fair")
    stepper.add("first", 20, max_tokens=5, tenant="a")
    stepper.run_to_end()
    stepper.add("second", 20, max_tokens=5, tenant="b")
    share = stepper.scheduler.share
    assert share is not None
    assert share.counter("b") == share.counter("a") > 0


def test_prompts_are_charged_for_what_they_compute_and_answers_by_token() -> None:
    stepper = Stepper(order="fair", has_prefix_cache=True, tenant_weights={"heavy": 2.0})
    share = stepper.scheduler.share
    assert share is not None
    stepper.add("a", 10, max_tokens=5, tenant="light")
    stepper.run_to_end()
    assert share.counter("light") == 10 * PREFILL_TOKEN_COST + 5 * DECODE_TOKEN_COST
    before = share.counter("heavy")
    stepper.add("b", 10, max_tokens=5, n=3, tenant="heavy")
    lifted = max(before, share.counter("light"))
    stepper.run_to_end()
    # 8 tokens of the prompt were cached; three answers are three times as many tokens.
    assert share.counter("heavy") == lifted + (2 * PREFILL_TOKEN_COST + 15 * DECODE_TOKEN_COST) / 2.0


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_a_cancelled_prompt_gives_back_what_was_not_computed(num_steps: int) -> None:
    stepper = Stepper(order="fair", budget=16)
    share = stepper.scheduler.share
    assert share is not None
    stepper.add("prompt", 60, tenant="a")
    stepper.steps(num_steps)
    if num_steps:
        assert share.counter("a") == 60 * PREFILL_TOKEN_COST
    stepper.abort("prompt")
    assert share.counter("a") == num_steps * 16 * PREFILL_TOKEN_COST


def test_a_preempted_answer_is_not_charged_again_for_what_it_computes_again() -> None:
    stepper = Stepper(order="fair", num_blocks=4)
    share = stepper.scheduler.share
    assert share is not None
    stepper.add("old", 7, max_tokens=4, tenant="a")
    stepper.add("victim", 7, max_tokens=9, tenant="b")
    records = stepper.run_to_end()
    assert any(record.preemptions for record in records)
    assert share.counter("a") == 7 * PREFILL_TOKEN_COST + 4 * DECODE_TOKEN_COST
    assert share.counter("b") == 7 * PREFILL_TOKEN_COST + 9 * DECODE_TOKEN_COST


def test_preempted_answers_come_back_before_anybody_new_whoever_was_served_less() -> None:
    stepper = Stepper(order="fair", num_blocks=4)
    stepper.add("old", 7, max_tokens=4, tenant="a")
    stepper.add("victim", 7, max_tokens=9, tenant="a")
    stepper.steps(3)
    stepper.add("new", 1, tenant="b")
    assert stepper.waiting == ["victim", "new"]
    came_in: list[str] = []
    while "new" not in came_in:
        record = stepper.step()
        came_in += record.resumed + record.admitted
    assert came_in == ["victim", "new"]


def test_the_least_served_tenant_goes_first_and_its_own_requests_in_order_of_arrival() -> None:
    stepper = Stepper(order="fair", max_num_seqs=1)
    for request_id in ("a1", "a2", "a3", "b1", "b2"):
        stepper.add(request_id, 10, max_tokens=2, tenant=request_id[0])
    admitted = [request_id for record in stepper.run_to_end() for request_id in record.admitted]
    assert admitted == ["a1", "b1", "a2", "b2", "a3"]


def test_counters_are_lifted_to_the_least_served_of_those_who_wait() -> None:
    share = FairShare({})
    share.charge_decode("a", 100)
    share.charge_decode("b", 10)
    share.lift("c", ["a", "b"])
    assert share.counter("c") == share.counter("b") == 10 * DECODE_TOKEN_COST
    share.lift("a", ["b", "c"])
    assert share.counter("a") == 100 * DECODE_TOKEN_COST


def test_a_request_that_waits_keeps_its_place_when_one_of_its_samples_ends_outside() -> None:
    stepper = Stepper(order="fair", max_num_seqs=2)
    stepper.add("running", 5, n=2, max_tokens=2, tenant="a")
    stepper.step()
    stepper.add("resumed", 5, n=2, max_tokens=9, tenant="a", outputs=[[5, 5], [6, 6]])
    stepper.add("later", 5, tenant="a")
    stepper.finish("resumed", 1)
    assert stepper.waiting == ["resumed", "later"]
