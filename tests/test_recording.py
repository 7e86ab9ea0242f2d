"""What --record writes, what it never writes, and that it never stands in the engine's way."""

import json
import logging
from pathlib import Path
from random import Random

import pytest

import tests.integer_oracle.player as player
from deployments.config import AppArgs
from kv_cache import BlockManager
from scheduler import PreemptionMode, QueuePolicy, Request, Scheduler, SchedulerConfig, SchedulerPolicy, StopRules
from scheduler.recording import Recorder
from scheduler.recording_reader import Recording, RecordingError
from scheduler.replay import Replayed, Replayer
from tests.integer_oracle.scenario import Scenario, random_scenario

NUM_SCENARIOS = 150
TOKEN = 987_654
STOP = 123_456


def recorded(path: Path, num_requests: int = 3, *, tenant: str = "", key: bytes = b"") -> Scheduler:
    """A small run with a request that stops early; the recording is closed."""
    recorder = Recorder(str(path))
    blocks = BlockManager(4, 40, 0)
    scheduler = Scheduler(SchedulerConfig(16, 4, 64), blocks, recorder)
    for number in range(num_requests):
        rules = StopRules(6, 64, stop_token_ids=frozenset({STOP}))
        keys = [[key + b"%d" % number]] if key else []
        scheduler.add(Request(f"r{number}", [TOKEN] * 7, rules, 0.5, tenant=tenant, block_keys=keys))
    now = 1.0
    while scheduler.has_unfinished():
        outputs = scheduler.schedule(now)
        samples = {chunk.seq_id: [TOKEN + 1] for chunk in outputs.chunks if chunk.do_sample}
        if outputs.step_id == 4:
            samples[outputs.chunks[0].seq_id] = [STOP]
        scheduler.update(outputs.step_id, samples, now + 0.25)
        now += 0.5
    recorder.close()
    return scheduler


def replayed(path: Path) -> Replayed:
    return Replayer(Recording(path), []).run()


def play_recorded(scenario: Scenario, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(str(path))
    monkeypatch.setattr(player, "Scheduler", lambda config, blocks: Scheduler(config, blocks, recorder))
    player.Player(scenario).play()
    recorder.close()


@pytest.mark.parametrize("queue_policy", list(QueuePolicy))
def test_replay_of_random_runs_with_groups_beams_and_cancels_decides_the_same(
    queue_policy: QueuePolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_steps = 0
    for seed in range(NUM_SCENARIOS // len(QueuePolicy)):
        rng = Random(f"{queue_policy} {seed}")
        scenario = random_scenario(
            rng, rng.choice(list(SchedulerPolicy)), rng.choice(list(PreemptionMode)), queue_policy
        )
        path = tmp_path / f"{seed}.jsonl"
        play_recorded(scenario, path, monkeypatch)
        result = replayed(path)
        assert result.difference is None, f"seed {seed}: {result.difference}"
        assert result.num_identical_steps == result.num_steps
        num_steps += result.num_steps
    assert num_steps > 1000


def play_siblings(path: Path, seed: int) -> None:
    """Groups of up to four whose tokens are zeros and ones, so that siblings agree for a while; some are resumed,
    with samples that have ended."""
    rng = Random(seed)
    recorder = Recorder(str(path))
    blocks = BlockManager(2, 26, rng.choice([0, 8]))
    config = SchedulerConfig(24, 10, 40, preemption_mode=rng.choice(list(PreemptionMode)))
    scheduler = Scheduler(config, blocks, recorder)
    for number in range(8):
        num_samples = rng.randint(1, 4)
        outputs = [[rng.randint(0, 1) for _ in range(rng.randint(1, 5))] for _ in range(num_samples)]
        rules = StopRules(rng.randint(6, 14), 40)
        is_resumed = rng.random() < 0.5
        ended = tuple(sorted(rng.sample(range(num_samples), rng.randrange(num_samples)))) if is_resumed else ()
        scheduler.add(
            Request(
                f"r{number}", [5] * rng.randint(1, 9), rules, 0.0, num_samples,
                output_token_ids=outputs if is_resumed else [], ended_samples=ended,
            )
        )  # fmt: skip
    now = 1.0
    while scheduler.has_unfinished():
        outputs = scheduler.schedule(now)
        samples: dict[int, list[int]] = {}
        for chunk in outputs.chunks:
            if chunk.do_sample:
                first = chunk.seq_id if chunk.sample_indices is None else chunk.seq_id - chunk.sample_indices[0]
                for index in chunk.sample_indices or [0]:
                    samples[first + index] = [rng.randint(0, 1)]
        if not outputs.is_empty:
            scheduler.update(outputs.step_id, samples, now + 0.5)
        now += 1.0
    recorder.close()


def test_siblings_share_blocks_in_a_replay_exactly_where_they_did(tmp_path: Path) -> None:
    num_that_agree = 0
    for seed in range(60):
        path = tmp_path / f"{seed}"
        play_siblings(path, seed)
        assert replayed(path).difference is None, f"seed {seed}"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            num_that_agree += len(line.pop("same", ()))
        (tmp_path / f"{seed} without").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert num_that_agree > 100
    without = [replayed(tmp_path / f"{seed} without").difference for seed in range(60)]
    assert any(without), "the runs did not depend on what siblings have in common"


def test_workers_record_where_the_command_was_given() -> None:
    assert AppArgs(record="run.rec").to_engine_config().record == str(Path.cwd() / "run.rec")


def test_no_token_tenant_or_block_key_is_written(tmp_path: Path) -> None:
    recorded(tmp_path / "run", tenant="a customer's name", key=b"key of somebody's text")
    text = (tmp_path / "run").read_text()
    assert '"add":"r0"' in text
    for secret in (str(TOKEN), str(TOKEN + 1), str(STOP), "customer", "somebody", b"key of".hex()):
        assert secret not in text


def test_every_line_is_a_json_object_and_the_first_one_is_the_header(tmp_path: Path) -> None:
    recorded(tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run").read_text().splitlines()]
    assert lines[0]["format"] == "stallfree-recording"
    assert lines[0]["scheduler"]["max_num_batched_tokens"] == 16
    assert lines[0]["num_device_blocks"] == 40
    assert {next(iter(line)) for line in lines[1:]} == {"add", "schedule", "update"}


def test_a_recording_never_overwrites_another_one(tmp_path: Path) -> None:
    for name in ("run", "run.1", "run.2"):
        recorder = Recorder(str(tmp_path / "run"))
        recorder.close()
        assert recorder.path == str(tmp_path / name)


def test_a_full_disk_ends_the_recording_and_not_the_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(str(tmp_path / "run"))
    recorder.close()
    recorder._file = open("/dev/full", "w", buffering=64)  # noqa: SIM115
    scheduler = Scheduler(SchedulerConfig(16, 4, 64), BlockManager(4, 40, 0), recorder)
    with caplog.at_level(logging.ERROR):
        for number in range(20):
            scheduler.add(Request(f"r{number}", [1] * 3, StopRules(1, 64), 0.0))
        while scheduler.has_unfinished():
            outputs = scheduler.schedule(1.0)
            scheduler.update(outputs.step_id, {c.seq_id: [1] for c in outputs.chunks if c.do_sample}, 2.0)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert "recording to" in messages[0]
    assert "No space left" in messages[0]


def test_what_was_recorded_is_on_disk_once_the_engine_is_idle(tmp_path: Path) -> None:
    recorder = Recorder(str(tmp_path / "run"))
    scheduler = Scheduler(SchedulerConfig(16, 4, 64), BlockManager(4, 40, 0), recorder)
    scheduler.add(Request("r", [1] * 3, StopRules(1, 64), 0.0))
    outputs = scheduler.schedule(1.0)
    scheduler.update(outputs.step_id, {0: [1]}, 2.0)
    assert replayed(tmp_path / "run").num_identical_steps == 1
    recorder.close()


def test_a_busy_engine_loses_at_most_the_last_second(tmp_path: Path) -> None:
    recorder = Recorder(str(tmp_path / "run"))
    scheduler = Scheduler(SchedulerConfig(16, 4, 64), BlockManager(4, 40, 0), recorder)
    scheduler.add(Request("r", [1] * 3, StopRules(60, 64), 0.0))
    for step in range(50):
        outputs = scheduler.schedule(step * 0.1)
        scheduler.update(outputs.step_id, {0: [1]}, step * 0.1 + 0.05)
    assert scheduler.has_unfinished()
    assert 40 <= replayed(tmp_path / "run").num_identical_steps <= 50
    recorder.close()


def test_a_recording_that_was_cut_off_in_the_middle_of_a_line_is_read_up_to_there(tmp_path: Path) -> None:
    recorded(tmp_path / "run")
    text = (tmp_path / "run").read_text()
    (tmp_path / "run").write_text(text[:-20])
    result = replayed(tmp_path / "run")
    assert result.num_steps == text.count('"schedule"')
    assert result.difference is None


def test_the_first_step_that_is_not_as_recorded_is_named(tmp_path: Path) -> None:
    recorded(tmp_path / "run")
    lines = (tmp_path / "run").read_text().splitlines(keepends=True)
    place = next(place for place, line in enumerate(lines) if '"counts"' in line)
    altered = json.loads(lines[place])
    del altered["counts"]  # as if the sequence had gone on
    lines[place] = json.dumps(altered) + "\n"
    (tmp_path / "run").write_text("".join(lines))
    result = replayed(tmp_path / "run")
    assert result.difference is not None
    assert result.difference.step_id == altered["update"] + 1
    assert result.num_identical_steps == altered["update"]
    assert result.num_steps > result.num_identical_steps


def test_other_files_are_refused_with_a_reason(tmp_path: Path) -> None:
    recorded(tmp_path / "run")
    text = (tmp_path / "run").read_text()
    for content, reason in (
        ("{}\n", "is not a recording"),
        ("[1]\n", "line 1 is not an object"),
        ("what\n", "line 1 is not JSON"),
        (text.replace('"version":1', '"version":99', 1), "format version 99"),
        (text.replace('"time":0.5', '"tim":0.5', 1), "line 2 is not an event"),
    ):
        (tmp_path / "other").write_text(content)
        with pytest.raises(RecordingError, match=reason):
            replayed(tmp_path / "other")
