"""What `/metrics` says after a mixed load equals what the clients of that load saw."""

import asyncio
import statistics
import subprocess
import time
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.debian_tools import program
from tests.end_to_end.asking import client, completion, streamed
from tests.end_to_end.configuration import MODEL, TOKEN_BUDGET
from tests.end_to_end.scrape import Growth, Scrape, scrape, settled
from tests.server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.model]

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
#: a server that stamps first tokens late, early or not at all is off by a step (tens of milliseconds) or more
MOST_APART_S = 0.025

#: the default of --block-size
BLOCK_SIZE = 16


@dataclass
class Load:
    """A mixed load as its clients saw it."""

    growth: Growth
    after: Scrape
    usages: list[dict[str, int]]
    finish_reasons: list[str]

    def sum_of(self, field: str) -> int:
        return sum(usage[field] for usage in self.usages)


@pytest.fixture(scope="module")
def load(server: ServerProcess) -> Load:
    """Short and long prompts, chats, several prompts in one call, streamed and not, all at once."""
    long_prompts = [completion([50 + i] * (300 + 100 * i), 4 + i, ignore_eos=True) for i in range(4)]
    short = [completion(f"The number {i} is", 10 + i, ignore_eos=True) for i in range(8)]
    several = completion(["One", "Two and more", "Three"], 5, ignore_eos=True)
    one_token = completion("Only one", 1)
    chat = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 64}
    usages: list[dict[str, int]] = []
    finish_reasons: list[str] = []

    async def whole(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
        answer = (await http.post(path, json=body)).json()
        usages.append(answer["usage"])
        finish_reasons.extend(choice["finish_reason"] for choice in answer["choices"])

    async def stream(http: httpx.AsyncClient, body: dict[str, Any]) -> None:
        seen = await streamed(http, body)
        assert seen.usage is not None
        assert seen.finish_reason is not None
        usages.append(seen.usage)
        finish_reasons.append(seen.finish_reason)

    async def all_at_once() -> None:
        async with client(server.url) as http, asyncio.TaskGroup() as tasks:
            for body in (*short, *long_prompts):
                tasks.create_task(stream(http, body))
            for body in (several, one_token, short[0]):
                tasks.create_task(whole(http, "/v1/completions", body))
            for _ in range(3):
                tasks.create_task(whole(http, "/v1/chat/completions", chat))

    before = settled(server)
    asyncio.run(all_at_once())
    after = settled(server)
    return Load(Growth(before, after), after, usages, finish_reasons)


def test_requests_are_counted_by_their_finish_reasons(load: Load):
    assert {"stop", "length"} == set(load.finish_reasons)
    for reason in ("stop", "length", "abort", "error"):
        counted = load.growth("stallfree_requests_total", finish_reason=reason)
        assert counted == load.finish_reasons.count(reason)


def test_tokens_are_those_of_usage(load: Load):
    assert load.growth("stallfree_prompt_tokens_total") == load.sum_of("prompt_tokens")
    assert load.growth("stallfree_generation_tokens_total") == load.sum_of("completion_tokens")


def test_each_request_that_produced_a_token_has_one_time_to_first_token(load: Load):
    num_requests = len(load.finish_reasons)
    assert load.growth("stallfree_time_to_first_token_seconds_count") == num_requests
    assert load.growth("stallfree_e2e_request_latency_seconds_count") == num_requests
    gaps = load.growth("stallfree_inter_token_latency_seconds_count")
    assert num_requests < gaps <= load.sum_of("completion_tokens") - num_requests


def computed_prompt_tokens(load: Load) -> float:
    """Those that the prefix cache did not give."""
    cached_tokens = BLOCK_SIZE * load.growth("stallfree_prefix_cache_hits_total")
    return load.sum_of("prompt_tokens") - cached_tokens


def test_chunks_hold_each_prompt_token_once(load: Load):
    """Less what was cached; nothing was computed twice, as nothing was preempted."""
    assert load.growth("stallfree_preemptions_total") == 0
    assert load.growth("stallfree_discarded_tokens_total") == 0
    assert load.growth("stallfree_prefill_chunk_tokens_sum") == computed_prompt_tokens(load)
    assert load.growth("stallfree_prefill_chunk_tokens_count") > len(load.finish_reasons)


def test_steps_hold_the_chunks_and_each_further_token_once(load: Load):
    """An answer's first token comes with the last chunk of its prompt, each other one from a token in a step."""
    further_tokens = load.sum_of("completion_tokens") - len(load.finish_reasons)
    assert load.growth("stallfree_step_tokens_sum") == computed_prompt_tokens(load) + further_tokens
    assert load.growth("stallfree_step_tokens_count") == load.growth("stallfree_step_seconds_count") > 0
    over_budget = load.growth("stallfree_step_tokens_bucket", le="+Inf") - load.growth(
        "stallfree_step_tokens_bucket", le=f"{TOKEN_BUDGET:.1f}"
    )
    assert over_budget == 0


def test_nothing_is_held_at_idle(load: Load):
    assert load.after.held == [0, 0, 0, 0]
    assert load.after.value("stallfree_worker_up") == 1


def test_a_lone_prompt_of_552_tokens_is_four_whole_chunks_and_one_of_40(server: ServerProcess):
    before = settled(server)
    httpx.post(f"{server.url}/v1/completions", json=completion([77] * (4 * TOKEN_BUDGET + 40), 1), timeout=60)
    growth = Growth(before, settled(server))
    assert growth("stallfree_prefill_chunk_tokens_count") == 5
    assert growth("stallfree_prefill_chunk_tokens_sum") == 552
    assert growth("stallfree_prefill_chunk_tokens_bucket", le="32.0") == 0
    assert growth("stallfree_prefill_chunk_tokens_bucket", le="64.0") == 1
    assert growth("stallfree_prefill_chunk_tokens_bucket", le="128.0") == 5
    assert growth("stallfree_step_tokens_count") == 5


def test_refused_requests_count_as_none(server: ServerProcess):
    before = settled(server)
    assert httpx.post(f"{server.url}/v1/completions", json=completion("a", -1)).status_code == 400
    growth = Growth(before, settled(server))
    assert growth("stallfree_requests_total") == 0
    assert growth("stallfree_prompt_tokens_total") == 0


def test_time_to_first_token_is_what_the_client_sees(server: ServerProcess):
    """Of each request by itself: a mean would hide what cancels out."""
    apart_s, seen_s = [], []
    with httpx.Client(base_url=server.url, timeout=60) as http:
        for num_prompt_tokens in (4, 120, 250, 500) * 5:
            before = scrape(server)
            body = completion([60] * num_prompt_tokens, 2, ignore_eos=True, stream=True)
            began_s = time.monotonic()
            with http.stream("POST", "/v1/completions", json=body) as response:
                lines = response.iter_lines()
                next(lines)
                seen_s.append(time.monotonic() - began_s)
                for _ in lines:
                    pass
            growth = Growth(before, scrape(server))
            assert growth("stallfree_time_to_first_token_seconds_count") == 1
            apart_s.append(seen_s[-1] - growth("stallfree_time_to_first_token_seconds_sum"))
    print(f"client minus server: median {statistics.median(apart_s) * 1e3:.1f} ms, worst {max(apart_s) * 1e3:.1f} ms")
    assert min(apart_s) > 0
    assert statistics.median(apart_s) < MOST_APART_S
    # Long prompts took visibly longer, and the server saw that too.
    assert max(seen_s) > 3 * min(seen_s)


def test_the_scrape_port_and_the_ingress_say_the_same(server: ServerProcess):
    settled(server)
    assert scrape(server, of_scrape_port=True).reported == scrape(server).reported


def test_promtool_finds_nothing_to_say(server: ServerProcess):
    promtool = program("promtool")
    for of_scrape_port in (False, True):
        text = scrape(server, of_scrape_port=of_scrape_port).text
        checked = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=30)
        assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
