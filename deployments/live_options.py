"""`LiveOptions`: what the worker deployment's `user_config` may set, and which values hold.

Options of the application hold where `user_config` names none. Applied between two steps, without a restart; what
cannot hold is refused whole, by the name of the option. Knows neither Serve nor the engine.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deployments.worker_queue import QueueLimits
from scheduler.limits import LimitError, StepLimits

#: prompt tokens that may wait at a worker where no option says so, in steps of the whole budget
DEFAULT_QUEUED_STEPS = 128


class UserConfig(BaseModel):
    """The fields by the names of the command line; null or absent: the application's option."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    target_itl_ms: float | None = None
    max_queued_tokens: int | None = Field(default=None, ge=0)
    max_queued_requests: int | None = Field(default=None, ge=0)


@dataclass(frozen=True, slots=True)
class LiveOptions:
    """What holds at a worker now."""

    steps: StepLimits
    queue: QueueLimits

    def with_user_config(self, user_config: Mapping[str, Any] | None) -> "LiveOptions":
        """These options, overridden. Raises `LimitError`, which names the field; what only the engine can tell, it
        tells when it is asked to apply them."""
        given = _parse(user_config or {}).model_dump(exclude_none=True)
        steps = {name: given.get(name, getattr(self.steps, name)) for name in StepLimits.__dataclass_fields__}
        queue = {name: given.get(name, getattr(self.queue, name)) for name in QueueLimits.__dataclass_fields__}
        return LiveOptions(StepLimits(**steps), QueueLimits(**queue))

    def values(self) -> dict[str, float]:
        """By option, for the metrics."""
        sources = (self.steps, self.queue)
        return {name: getattr(source, name) for source in sources for name in source.__dataclass_fields__}


def options_at_start(steps: StepLimits, max_queued_tokens: int | None, max_queued_requests: int) -> LiveOptions:
    """`max_queued_tokens` None: so many full steps that a client would rather ask again later."""
    if max_queued_tokens is None:
        max_queued_tokens = DEFAULT_QUEUED_STEPS * steps.max_num_batched_tokens
    return LiveOptions(steps, QueueLimits(max_queued_tokens, max_queued_requests))


def _parse(user_config: Mapping[str, Any]) -> UserConfig:
    if not isinstance(user_config, Mapping):
        raise LimitError("user_config", f"must hold options by name, not a {type(user_config).__name__}")
    try:
        return UserConfig.model_validate(dict(user_config))
    except ValidationError as error:
        first = error.errors()[0]
        option = str(first["loc"][0])
        if first["type"] == "extra_forbidden":
            known = ", ".join(UserConfig.model_fields)
            raise LimitError(option, f"there is no such option; user_config may set {known}") from None
        raise LimitError(option, f"{first['msg']}, got {first['input']!r}") from None
