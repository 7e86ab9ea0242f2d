"""What `user_config` may set, and that what cannot hold is refused whole and by name."""

import pytest

from deployments.live_options import DEFAULT_QUEUED_STEPS, LiveOptions, options_at_start
from deployments.worker_queue import QueueLimits
from monitoring.table import LIVE_OPTIONS
from scheduler.limits import LimitError, StepLimits

START = LiveOptions(StepLimits(256, 64, 0.0), QueueLimits(1000, 50))


def test_without_user_config_the_options_of_the_application_hold() -> None:
    assert START.with_user_config(None) == START
    assert START.with_user_config({}) == START
    assert START.with_user_config({"max_num_seqs": None}) == START


def test_given_fields_override_and_the_others_stay() -> None:
    changed = START.with_user_config({"max_num_batched_tokens": 128, "target_itl_ms": 20, "max_queued_requests": 0})
    assert changed == LiveOptions(StepLimits(128, 64, 20.0), QueueLimits(1000, 0))


def test_each_option_has_a_series() -> None:
    assert tuple(START.values()) == LIVE_OPTIONS
    assert START.values()["max_queued_tokens"] == 1000


def test_the_queue_holds_so_many_full_steps_where_no_option_says() -> None:
    steps = StepLimits(256, 64)
    assert options_at_start(steps, None, 9).queue == QueueLimits(DEFAULT_QUEUED_STEPS * 256, 9)
    assert options_at_start(steps, 0, 9).queue == QueueLimits(0, 9)


@pytest.mark.parametrize(
    ("user_config", "option", "words"),
    [
        ({"max_num_sequences": 4}, "max_num_sequences", "no such option.*max_num_seqs"),
        ({"block_size": 16}, "block_size", "no such option"),
        ({"max_num_seqs": "8"}, "max_num_seqs", "integer.*'8'"),
        ({"max_num_seqs": True}, "max_num_seqs", "integer"),
        ({"target_itl_ms": True}, "target_itl_ms", "number"),
        ({"max_queued_tokens": -1}, "max_queued_tokens", "-1"),
        ({"target_itl_ms": "fast"}, "target_itl_ms", "number"),
        (["max_num_seqs"], "user_config", "by name"),
    ],
)
def test_a_wrong_field_is_refused_by_name(user_config: object, option: str, words: str) -> None:
    with pytest.raises(LimitError, match=words) as caught:
        START.with_user_config(user_config)  # type: ignore[arg-type]
    assert caught.value.option == option
