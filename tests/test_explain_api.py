"""Explanations over HTTP with the real engine behind it: sums, causes, who may read them, running requests."""

import asyncio
import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from deployments.explain.explanation import MASK, PART_NAMES
from deployments.keys import KeyRing
from tests.explained_service import ExplainedApi, run_explained
from tests.tiny_models import save_tiny_model
from tests.tiny_tokenizer import save_tiny_tokenizer

#: a first token, and what it makes of a prompt: its worker is lost after so many frames
LOST_LATE, LOST_EARLY = 65, 66
KEYS = KeyRing.parse(
    json.dumps(
        [
            {"key": "sk-a", "tenant": "a"},
            {"key": "sk-b", "tenant": "b"},
            {"key": "sk-plain"},
            {"key": "sk-other"},
            {"key": "sk-admin", "admin": True},
        ]
    )
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_tokenizer(save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", "llama"))


def part_of(explanation: dict[str, Any], name: str, cause: str | None = None) -> dict[str, Any]:
    (part,) = [part for part in explanation["parts"] if (part["name"], part["cause"]) == (name, cause)]
    return part


def check(explanation: dict[str, Any]) -> None:
    """What holds of every explanation."""
    total_ms = explanation["end_to_end_ms"]
    assert sum(part["ms"] for part in explanation["parts"]) == pytest.approx(total_ms, abs=1e-3)
    assert sum(ms for _, _, ms in explanation["timeline"]) == pytest.approx(total_ms, abs=1e-3)
    for part in explanation["parts"]:
        assert part["ms"] > 0
        assert part["name"] in PART_NAMES
        assert sum(blocker["ms"] for blocker in part["blockers"]) <= part["ms"] + 1e-6
        if part["name"] == "other":
            assert part["ms"] <= max(5.0, 0.01 * total_ms), explanation


def auth(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_a_short_request_behind_a_long_prompt_reads_so(folder: Path):
    async def scenario(api: ExplainedApi) -> None:
        asking = asyncio.create_task(api.complete(prompt=[7] * 2000, max_tokens=2))
        await asyncio.sleep(0.05)
        late = await api.complete(prompt=[8] * 20, max_tokens=4, explain=True, headers={"x-request-id": "my-own"})
        long = await asking
        explanation = await api.explain(late["id"])
        check(explanation)
        assert explanation == late["explanation"] == await api.explain("my-own")
        queue = part_of(explanation, "queue", "token_budget")
        assert queue["blockers"][0]["id"] == long["id"]
        assert queue["blockers"][0]["ms"] > 0.5 * queue["ms"] > 50
        assert explanation["status"] == "length"
        assert explanation["workers"] == [{"worker": 0, "replica": "0", "lost": None}]
        client_ms = api.client_ms[late["id"]]
        assert abs(explanation["end_to_end_ms"] - client_ms) < max(20, 0.05 * client_ms)

    run_explained(folder, scenario, max_num_batched_tokens=64, step_s=0.01)


def test_the_last_chunk_of_a_stream_carries_it_where_it_was_asked_for(folder: Path):
    async def scenario(api: ExplainedApi) -> None:
        body = {"model": "tiny", "prompt": [7] * 20, "max_tokens": 3, "stream": True, "explain": True}
        response = await api.http.post("/v1/completions", json=body)
        *_, last, done = [block.removeprefix("data: ") for block in response.text.split("\n\n")[:-1]]
        assert done == "[DONE]"
        explanation = json.loads(last)["explanation"]
        check(explanation)
        assert explanation == await api.explain(json.loads(last)["id"])

    run_explained(folder, scenario)


@pytest.mark.parametrize(
    ("path", "fields", "last_event"),
    [
        ("/v1/responses", {"input": "hello", "max_output_tokens": 3}, "response.incomplete"),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "stop_sequences": ["never"]},
            "message_stop",
        ),
    ],
)
def test_the_other_dialects_carry_it_where_it_was_asked_for(
    path: str, fields: dict[str, Any], last_event: str, folder: Path
):
    async def scenario(api: ExplainedApi) -> None:
        body = {"model": "tiny", "temperature": 0, **fields}
        whole = (await api.http.post(path, json={**body, "explain": True})).json()
        check(whole["explanation"])
        assert whole["explanation"] == await api.explain(whole["id"])
        assert "explanation" not in (await api.http.post(path, json=body)).json()
        for asked in (True, False):
            response = await api.http.post(path, json={**body, "stream": True, "explain": asked})
            *before, last = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]
            assert last["type"] == last_event
            assert not any("explanation" in event for event in before)
            assert ("explanation" in last) == asked
            if asked:
                check(last["explanation"])

    run_explained(folder, scenario)


def test_a_prompt_that_is_only_scored_has_no_first_token(folder: Path):
    async def scenario(api: ExplainedApi) -> None:
        scored = await api.complete(prompt=[7] * 20, max_tokens=0, echo=True, explain=True)
        check(scored["explanation"])
        assert scored["explanation"]["time_to_first_token_ms"] is None
        answered = await api.complete(prompt=[7] * 20, max_tokens=1, explain=True)
        assert 0 < answered["explanation"]["time_to_first_token_ms"] <= answered["explanation"]["end_to_end_ms"]

    run_explained(folder, scenario)


def test_a_running_request_is_explained_as_far_as_it_has_come(folder: Path):
    async def scenario(api: ExplainedApi) -> None:
        asking = asyncio.create_task(api.complete(prompt=[7] * 20, max_tokens=60, headers={"x-request-id": "running"}))
        await asyncio.sleep(0.1)
        explanation = await api.explain("running")
        check(explanation)
        assert explanation["status"] == "running"
        assert part_of(explanation, "decode")["ms"] > 20
        answer = await asking
        assert (await api.explain("running"))["id"] == answer["id"] == explanation["id"]
        assert (await api.explain("running"))["status"] == "length"

    run_explained(folder, scenario)


def test_an_answer_that_a_stop_string_ended_is_explained_though_its_worker_went_on(folder: Path):
    async def scenario(api: ExplainedApi) -> None:
        whole = await api.complete(prompt=[9] * 8, max_tokens=20)
        stop = whole["choices"][0]["text"][5:7]
        answer = await api.complete(prompt=[9] * 8, max_tokens=20, stop=[stop], n=1)
        assert answer["choices"][0]["finish_reason"] == "stop"
        explanation = await api.explain(answer["id"])
        check(explanation)
        assert part_of(explanation, "decode")["ms"] > 5
        assert explanation["end_to_end_ms"] == pytest.approx(api.client_ms[answer["id"]], abs=20)

    run_explained(folder, scenario)


def test_the_prompts_of_one_call_are_explained_each_and_the_call_by_its_longest(folder: Path):
    async def scenario(api: ExplainedApi) -> None:
        answer = await api.complete(prompt=[[7] * 10, [8] * 300], max_tokens=3, n=2)
        call = await api.explain(answer["id"])
        check(call)
        assert set(call["requests"]) == {f"{answer['id']}-0", f"{answer['id']}-1"}
        for request_id in call["requests"]:
            own = await api.explain(request_id)
            check(own)
            assert own["end_to_end_ms"] <= call["end_to_end_ms"]

    run_explained(folder, scenario, max_num_batched_tokens=64)


def test_only_the_owner_and_admins_may_read_it_and_other_tenants_have_no_names(folder: Path):
    async def scenario(api: ExplainedApi) -> None:
        asking = asyncio.create_task(api.complete(auth("sk-b"), prompt=[7] * 1000, max_tokens=2))
        await asyncio.sleep(0.03)
        answer = await api.complete(auth("sk-a"), prompt=[8] * 20, max_tokens=4)
        long = await asking
        path = f"/v1/requests/{answer['id']}/explain"
        for key in ("sk-b", "sk-plain"):
            refused = await api.http.get(path, headers=auth(key))
            assert refused.status_code == 404
            assert refused.json()["error"]["code"] == "request_not_found"
        assert (await api.http.get(path)).status_code == 401
        own = await api.explain(answer["id"], auth("sk-a"))
        assert long["id"] not in json.dumps(own)
        assert part_of(own, "queue", "token_budget")["blockers"][0]["id"] == MASK
        seen = await api.explain(answer["id"], auth("sk-admin"))
        assert part_of(seen, "queue", "token_budget")["blockers"][0]["id"] == long["id"]
        plain = await api.complete(auth("sk-plain"), prompt=[8] * 20, max_tokens=1)
        assert (await api.explain(plain["id"], auth("sk-plain")))["id"] == plain["id"]
        other = await api.http.get(f"/v1/requests/{plain['id']}/explain", headers=auth("sk-other"))
        assert other.status_code == 404

    run_explained(folder, scenario, max_num_batched_tokens=64, keys=KEYS)


def test_an_id_that_another_tenant_chose_too_finds_each_ones_own(folder: Path):
    async def scenario(api: ExplainedApi) -> None:
        own = await api.complete(auth("sk-a") | {"x-request-id": "shared"}, prompt=[7] * 20, max_tokens=1)
        other = await api.complete(auth("sk-b") | {"x-request-id": "shared"}, prompt=[8] * 20, max_tokens=1)
        assert (await api.explain("shared", auth("sk-a")))["id"] == own["id"]
        assert (await api.explain("shared", auth("sk-b")))["id"] == other["id"]
        assert set((await api.explain("shared", auth("sk-admin")))["requests"]) == {own["id"], other["id"]}

    run_explained(folder, scenario, keys=KEYS)


def test_an_id_of_the_clients_own_may_hold_what_paths_are_made_of(folder: Path):
    async def scenario(api: ExplainedApi) -> None:
        answer = await api.complete({"x-request-id": "a/b?x"}, prompt=[7] * 20, max_tokens=1)
        for path in ("a%2Fb%3Fx", "a/b%3Fx", answer["id"]):
            assert (await api.explain(path))["id"] == answer["id"]
        unknown = await api.http.get("/v1/requests/a%2Fc/explain")
        assert unknown.json()["error"]["code"] == "request_not_found"

    run_explained(folder, scenario)


def test_an_unknown_request_is_a_404_that_says_what_is_kept(folder: Path):
    async def scenario(api: ExplainedApi) -> None:
        response = await api.http.get("/v1/requests/cmpl-never/explain")
        assert response.status_code == 404
        error = response.json()["error"]
        assert (error["type"], error["code"], error["param"]) == ("not_found_error", "request_not_found", "request_id")
        assert "newest" in error["message"]

    run_explained(folder, scenario)


def test_under_pressure_with_a_failover_all_parts_sum_and_agree_with_the_client(folder: Path):
    """Long prompts, groups, preemptions and swaps in small pools, urgent requests, and workers that are lost."""

    async def scenario(api: ExplainedApi) -> None:
        draw = random.Random(5)
        api.workers.cuts = {chr(LOST_LATE): [4], chr(LOST_EARLY): [1, 2]}

        async def ask(number: int) -> dict[str, Any]:
            await asyncio.sleep(draw.uniform(0.0, 0.3))
            first = LOST_LATE if number % 20 == 0 else LOST_EARLY if number % 20 == 1 else 70 + number % 20
            length = draw.choice((10, 40, 80, 400 if number % 10 == 3 else 60))
            return await api.complete(
                prompt=[first, *([number % 200 + 1] * length)],
                max_tokens=draw.randint(20, 60),
                n=draw.choice((1, 1, 2)) if first >= 70 else 1,
                priority=draw.choice((0, 0, -2, 2)),
            )

        answers = await asyncio.gather(*(ask(number) for number in range(60)))
        seen: set[tuple[str, str | None]] = set()
        misses: list[float] = []
        for answer in answers:
            explanation = await api.explain(answer["id"])
            check(explanation)
            misses.append(api.client_ms[answer["id"]] - explanation["end_to_end_ms"])
            seen |= {(part["name"], part["cause"]) for part in explanation["parts"]}
            losses = [worker["lost"] for worker in explanation["workers"]]
            assert losses[-1] is None
        # The clients share one thread with the server, so that many of them wait for their turn.
        assert min(misses) > 0
        assert statistics.median(misses) < 50
        assert {"queue", "prefill", "decode", "interference", "failover", "tokenize"} <= {name for name, _ in seen}
        assert {"preempted", "swapped"} & {name for name, _ in seen}
        assert {("queue", "token_budget"), ("prefill", "failover"), ("failover", "died")} <= seen

    run_explained(
        folder,
        scenario,
        num_workers=3,
        step_s=0.004,
        max_num_batched_tokens=64,
        max_num_seqs=16,
        num_device_blocks=34,
        num_host_blocks=40,
        max_model_len=500,
        preemption_mode="auto",
        queue_policy="priority",
        block_size=16,
    )
