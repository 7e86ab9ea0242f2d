"""A pool too small for the load changes no answer, and its server ends in the middle of such a load."""

import asyncio
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.end_to_end.asking import Streamed, all_streamed, completion
from tests.end_to_end.configuration import DEMO_OPTIONS
from tests.end_to_end.scrape import Growth, scrape, settled
from tests.oracle.compare import NEAR_TIE_MARGIN
from tests.server_process import STOP_TIMEOUT_S, ServerProcess, alive, serving, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.model]

MODES = ["swap", "recompute"]
#: one that lets the whole load end after SIGTERM, and one that does not
DRAIN_TIMEOUTS_S = {"swap": 60.0, "recompute": 0.5}
#: for Ray's own processes, beyond the drain
ENDED_TIMEOUT_S = 20.0
NUM_ANSWERS = 12
NUM_TOKENS = 64
#: an answer needs up to 11 of these blocks, all twelve about 130
TINY_POOL_OPTIONS = ("--max-model-len", "128", "--block-size", "8", "--num-device-blocks", "41")

BODIES = [
    completion(f"Chapter {i + 1}. In the year {1800 + 17 * i} the harbour", NUM_TOKENS, ignore_eos=True, logprobs=2)
    for i in range(NUM_ANSWERS)
]


@pytest.fixture(scope="module", params=MODES)
def crowded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    own = ("--preemption-mode", request.param, "--drain-timeout-s", str(DRAIN_TIMEOUTS_S[request.param]))
    with serving(tmp_path_factory.mktemp("server") / "stderr", *DEMO_OPTIONS, *TINY_POOL_OPTIONS, *own) as running:
        yield running


@pytest.fixture(scope="module")
def alone(server: ServerProcess) -> list[dict[str, Any]]:
    """Each answer as a server gives it that has nothing else to do: one choice with its log-probabilities."""
    with httpx.Client(base_url=server.url, timeout=60) as http:
        return [http.post("/v1/completions", json=body).json()["choices"][0] for body in BODIES]


def margin_where_they_part(alone: dict[str, Any], tokens: list[str]) -> float:
    """By how much the undisturbed answer preferred its token to the next best, where the other one first differs."""
    expected = alone["logprobs"]["tokens"]
    place = next(i for i, (one, other) in enumerate(zip(expected, tokens, strict=True)) if one != other)
    best, second = sorted(alone["logprobs"]["top_logprobs"][place].values(), reverse=True)[:2]
    return best - second


def test_preempted_answers_are_those_of_a_server_that_is_alone_with_each(
    crowded: ServerProcess, alone: list[dict[str, Any]], request: pytest.FixtureRequest
):
    mode, other = MODES if "swap" in request.node.name else MODES[::-1]
    before = settled(crowded)
    streams = asyncio.run(all_streamed(crowded.url, BODIES))
    growth = Growth(before, settled(crowded))

    assert [stream.end for stream in streams] == ["done"] * NUM_ANSWERS
    assert [stream.usage["completion_tokens"] for stream in streams if stream.usage] == [NUM_TOKENS] * NUM_ANSWERS
    different = [i for i in range(NUM_ANSWERS) if streams[i].tokens != alone[i]["logprobs"]["tokens"]]
    # Rounding alone may turn a choice between equals, rarely.
    assert len(different) <= 1
    for i in different:
        assert margin_where_they_part(alone[i], streams[i].tokens) <= NEAR_TIE_MARGIN

    assert growth("stallfree_preemptions_total", mode=mode) > 0
    assert growth("stallfree_preemptions_total", mode=other) == 0
    blocks_out = growth("stallfree_swapped_blocks_total", direction="out")
    assert blocks_out == growth("stallfree_swapped_blocks_total", direction="in")
    prompt_tokens = sum(stream.usage["prompt_tokens"] for stream in streams if stream.usage)
    if mode == "swap":
        assert blocks_out > 0
        assert growth("stallfree_discarded_tokens_total") == 0
        assert growth("stallfree_prefill_chunk_tokens_sum") == prompt_tokens
    else:
        assert blocks_out == 0
        assert growth("stallfree_discarded_tokens_total") > 0
        assert growth("stallfree_prefill_chunk_tokens_sum") > prompt_tokens
    # What is computed twice is no more of the client's.
    assert growth("stallfree_prompt_tokens_total") == prompt_tokens
    assert growth("stallfree_generation_tokens_total") == NUM_ANSWERS * NUM_TOKENS


def test_a_request_that_the_pool_could_never_hold_is_refused_and_the_next_one_served(crowded: ServerProcess):
    with httpx.Client(base_url=crowded.url, timeout=60) as http:
        refused = http.post("/v1/completions", json=completion([5] * 400, 4))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
        assert http.post("/v1/completions", json=completion("Hello", 4)).status_code == 200


def test_sigterm_in_the_middle_of_streams_ends_every_process(crowded: ServerProcess, request: pytest.FixtureRequest):
    """The last test of its server. Streams end whole where the drain time allows; cut off or not, the end is soon."""
    family = crowded.family()
    assert any("raylet" in process.name() for process in family)

    async def end_while_they_stream() -> tuple[list[Streamed], float]:
        streaming = asyncio.create_task(all_streamed(crowded.url, BODIES))
        await asyncio.to_thread(wait_until, lambda: scrape(crowded).value("stallfree_num_requests_running") > 0, 20.0)
        began_s = time.monotonic()
        crowded.process.send_signal(signal.SIGTERM)
        streams = await streaming
        await asyncio.to_thread(crowded.process.wait, STOP_TIMEOUT_S)
        return streams, time.monotonic() - began_s

    streams, ended_s = asyncio.run(end_while_they_stream())
    ends = {stream.end for stream in streams}
    print(f"ended in {ended_s:.1f} s; streams: {ends}")
    assert crowded.process.returncode == 0
    if "swap" in request.node.name:
        assert ends == {"done"}
        assert {stream.usage["completion_tokens"] for stream in streams if stream.usage} == {NUM_TOKENS}
        assert ended_s < DRAIN_TIMEOUTS_S["swap"]
    else:
        assert "done" not in ends
        assert ended_s < DRAIN_TIMEOUTS_S["recompute"] + ENDED_TIMEOUT_S
    psutil.wait_procs(family, timeout=5.0)
    assert alive(family) == []
    assert "Traceback" not in crowded.log.read_text()
