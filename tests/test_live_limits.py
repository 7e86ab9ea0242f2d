"""Limits that change while requests run: nobody loses a place, nothing gets stuck, every answer stays the same."""

from functools import partial
from pathlib import Path
from random import Random

import pytest

import tests.integer_oracle.player as player
from scheduler import PreemptionMode, QueuePolicy, RequestTooLargeError, Scheduler, SchedulerOutputs, SchedulerPolicy
from scheduler.limits import LimitError, StepLimits
from scheduler.recording import Recorder
from scheduler.recording_reader import Recording
from scheduler.replay import Replayer
from tests.integer_oracle.scenario import random_scenario
from tests.scheduling import Stepper, chunk_sizes

NUM_SCENARIOS = 120


class RestlessScheduler(Scheduler):
    """Changes its own limits every few steps, to anything that is allowed."""

    rng: Random
    num_changes = 0

    def schedule(self, now: float) -> SchedulerOutputs:
        if self.rng.random() < 0.3:
            start = self._start_config
            is_whole = start.policy is SchedulerPolicy.DEFAULT
            num_seqs = self.rng.randint(1, start.max_num_seqs)
            least = max(num_seqs + start.min_prefill_tokens, start.max_model_len if is_whole else 1)
            self.set_limits(StepLimits(self.rng.randint(least, start.max_num_batched_tokens), num_seqs))
            type(self).num_changes += 1
        return super().schedule(now)


@pytest.mark.parametrize("queue_policy", list(QueuePolicy))
def test_random_runs_under_changing_limits_keep_the_invariants_every_token_and_replay_the_same(
    queue_policy: QueuePolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RestlessScheduler, "num_changes", 0)
    for seed in range(NUM_SCENARIOS // len(QueuePolicy)):
        rng = Random(f"limits {queue_policy} {seed}")
        monkeypatch.setattr(RestlessScheduler, "rng", rng, raising=False)
        scenario = random_scenario(
            rng, rng.choice(list(SchedulerPolicy)), rng.choice(list(PreemptionMode)), queue_policy
        )
        recorder = Recorder(str(tmp_path / f"{seed}.jsonl"))
        with monkeypatch.context() as patch:
            patch.setattr(player, "Scheduler", partial(RestlessScheduler, recorder=recorder))
            played = player.Player(scenario).play()
        recorder.close()
        player.check_answers(scenario, played)
        result = Replayer(Recording(Path(recorder.path)), []).run()
        assert result.difference is None, f"seed {seed}: {result.difference}"
    assert RestlessScheduler.num_changes > 200


def test_a_lower_budget_holds_in_the_next_step_and_the_running_answer_goes_on() -> None:
    run = Stepper(budget=64, max_num_seqs=4, max_model_len=400)
    run.add("decoding", 4)
    run.step()
    run.add("long", 300)
    assert chunk_sizes(run.step()) == {"long": 63}
    run.scheduler.set_limits(StepLimits(16, 4))
    record = run.step()
    assert chunk_sizes(record) == {"long": 15}
    assert record.decode_request_ids == ["decoding"]
    run.scheduler.set_limits(StepLimits(64, 4))
    assert chunk_sizes(run.step()) == {"long": 63}


def test_more_running_sequences_than_a_lower_limit_all_go_on_and_nobody_comes_in_until_enough_have_ended() -> None:
    run = Stepper(budget=64, max_num_seqs=6, max_model_len=64)
    for number in range(6):
        run.add(f"r{number}", 2, max_tokens=3 + number)
    run.step()
    run.scheduler.set_limits(StepLimits(2, 2))
    run.add("late", 2, max_tokens=2)
    while "late" in run.waiting:
        num_running = len(run.running)
        record = run.step()
        if "late" in run.waiting:
            assert record.num_decodes == num_running >= 2
        else:
            assert record.num_decodes == num_running == 1
    run.run_to_end()
    assert all(run.ends[f"r{number}"].finish_reason == "length" for number in range(6))
    assert run.ends["late"].finish_reason == "length"


def test_a_group_wider_than_a_lower_limit_still_comes_in_and_the_next_such_is_refused() -> None:
    run = Stepper(budget=64, max_num_seqs=4, max_model_len=64)
    run.add("first", 3, max_tokens=4, n=4)
    run.step()
    run.add("wide", 3, max_tokens=4, n=4)
    run.scheduler.set_limits(StepLimits(64, 2))
    with pytest.raises(RequestTooLargeError, match="at most 2"):
        run.add("too wide", 3, n=3)
    run.run_to_end(max_steps=40)
    assert all(run.sample_ends["wide", index].finish_reason == "length" for index in range(4))


def test_a_governor_comes_with_its_target_and_goes_with_it() -> None:
    run = Stepper(budget=64, max_num_seqs=4, chunk_alignment=32)
    assert run.scheduler.governor is None
    run.scheduler.set_limits(StepLimits(16, 4, 20.0))
    governor = run.scheduler.governor
    assert governor is not None
    run.add("decoding", 3)
    run.step()
    run.add("prompt", 40)
    # It has seen no step yet and starts with one alignment, which is no more than the budget.
    assert chunk_sizes(run.step()) == {"prompt": 15}
    run.scheduler.set_limits(StepLimits(16, 4, 30.0))
    assert run.scheduler.governor is governor
    run.scheduler.set_limits(StepLimits(16, 4, 0.0))
    assert run.scheduler.governor is None


@pytest.mark.parametrize(
    ("limits", "option", "words"),
    [
        (StepLimits(65, 8), "max_num_batched_tokens", "from 1 to 64.*got 65"),
        (StepLimits(0, 1), "max_num_batched_tokens", "got 0"),
        (StepLimits(64, 9), "max_num_seqs", "from 1 to 8"),
        (StepLimits(64, 0), "max_num_seqs", "got 0"),
        (StepLimits(9, 8), "max_num_batched_tokens", "max_num_seqs 8"),
        (StepLimits(64, 8, -1.0), "target_itl_ms", "0 .off. or more"),
        (StepLimits(64, 8, float("nan")), "target_itl_ms", "nan"),
    ],
)
def test_a_limit_that_cannot_hold_is_refused_by_name_and_changes_nothing(
    limits: StepLimits, option: str, words: str
) -> None:
    run = Stepper(budget=64, max_num_seqs=8, min_prefill_tokens=2)
    before = run.scheduler.limits
    with pytest.raises(LimitError, match=words) as caught:
        run.scheduler.set_limits(limits)
    assert caught.value.option == option
    assert run.scheduler.limits == before


@pytest.mark.parametrize("limits", [StepLimits(63, 8), StepLimits(64, 8, 20.0)])
def test_policy_default_keeps_room_for_whole_prompts(limits: StepLimits) -> None:
    run = Stepper(policy="default", budget=128, max_num_seqs=8, max_model_len=64)
    with pytest.raises(LimitError, match="default"):
        run.scheduler.set_limits(limits)
