"""The line that each ended request leaves in the log."""

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deployments.request_log import OFF, RequestLog, open_request_log
from deployments.worker_client import WorkerOverloadedError
from tests.api_client import MODEL, Api, answering, stream_events


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "requests.jsonl"


@pytest.fixture
def log(path: Path) -> Iterator[RequestLog]:
    log = open_request_log(str(path), MODEL)
    yield log
    log.close()


def logged(api: Api, log: RequestLog) -> Api:
    return replace(api, request_log=log)


def test_each_request_leaves_one_line_that_agrees_with_its_usage_and_has_no_text(path: Path, log: RequestLog) -> None:
    api = logged(answering("a secret answer", num_cached_tokens=2), log)
    whole = api.complete(prompt="a secret question").json()
    events = stream_events(api.chat(stream=True, stream_options={"include_usage": True}))
    first, second = lines_of(path)
    assert first["id"] == whole["id"]
    assert second["id"] == events[0]["id"]
    for line, usage in ((first, whole["usage"]), (second, events[-2]["usage"])):
        assert line["prompt_tokens"] == usage["prompt_tokens"]
        assert line["completion_tokens"] == usage["completion_tokens"]
        assert line["cached_tokens"] == 2
        assert (line["event"], line["model"], line["finish_reason"]) == ("request", MODEL, "stop")
        assert 0 <= line["ttft_ms"] <= line["e2e_ms"]
        assert line["time_per_token_ms"] >= 0
    assert "secret" not in path.read_text()


def test_several_prompts_are_several_requests_with_all_their_tokens(path: Path, log: RequestLog) -> None:
    api = logged(answering("one two"), log)
    usage = api.complete(prompt=["the cat", "a dog", "one"], n=2).json()["usage"]
    lines = lines_of(path)
    assert len(lines) == len({line["id"] for line in lines}) == 3
    assert sum(line["completion_tokens"] for line in lines) == usage["completion_tokens"]
    assert sum(line["prompt_tokens"] for line in lines) == usage["prompt_tokens"]
    assert sorted(api.metrics.sizes) == sorted((line["prompt_tokens"], line["completion_tokens"]) for line in lines)


def test_a_failed_answer_leaves_a_line_and_one_that_was_never_taken_none(path: Path, log: RequestLog) -> None:
    assert logged(answering("a b c", engine_error="broken", fail_after=1), log).complete().status_code == 500
    assert logged(answering("a", reject=WorkerOverloadedError(1.0)), log).complete().status_code == 429
    [line] = lines_of(path)
    assert line["finish_reason"] == "error"
    assert line["time_per_token_ms"] is None


def test_a_file_that_was_moved_away_is_made_anew(path: Path, log: RequestLog) -> None:
    api = logged(answering("a"), log)
    api.complete()
    path.rename(path.with_suffix(".old"))
    api.complete()
    assert len(lines_of(path)) == len(lines_of(path.with_suffix(".old"))) == 1


class KeptRecords(logging.Handler):
    """Of one logger alone: what others make of them is not looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def serve_records() -> Iterator[list[logging.LogRecord]]:
    logger, kept = logging.getLogger("ray.serve"), KeptRecords()
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(kept)
    yield kept.records
    logger.removeHandler(kept)
    logger.setLevel(level)


def test_without_a_file_the_line_goes_to_serves_log_at_info_and_off_writes_none(
    serve_records: list[logging.LogRecord],
) -> None:
    for target in (None, OFF):
        logged(answering("a"), open_request_log(target, MODEL)).complete()
    [record] = [record for record in serve_records if '"event"' in record.getMessage()]
    assert record.levelno == logging.INFO
    assert json.loads(record.getMessage())["finish_reason"] == "stop"
