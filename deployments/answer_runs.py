"""`AnswerRunner`: jobs on workers, as the text of their answers. Owns what a failure becomes and what is counted of it.

Knows neither how a job came about nor the shapes of responses.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from deployments.admission import Admission
from deployments.answer_meter import AnswerMeter
from deployments.answers import Answer, AnswerAccepted, Delta, follow
from deployments.explain.journeys import Journeys
from deployments.keys import ANYBODY, Caller
from deployments.merging import merged
from deployments.protocol.errors import ApiError, bad_request, deadline_passed, overloaded, unavailable
from deployments.request_log import RequestLog
from deployments.worker_client import (
    RequestRejectedError,
    WorkerClient,
    WorkerFailedError,
    WorkerOverloadedError,
    WorkerUnavailableError,
)
from worker.types import EngineRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt on its way: what the engine gets, what the client gets (one answer a sample), what is counted."""

    request: EngineRequest
    answers: list[Answer]
    meter: AnswerMeter
    timeout_s: float | None
    caller: Caller = ANYBODY

    @property
    def deadline_s(self) -> float | None:
        return None if self.timeout_s is None else self.meter.arrival_s + self.timeout_s


class AnswerRunner:
    """Each answer ends by itself, by its deadline, or when the ingress does."""

    def __init__(
        self, client: WorkerClient, admission: Admission, journeys: Journeys, request_log: RequestLog
    ) -> None:
        self._client = client
        self._admission = admission
        self._journeys = journeys
        self._request_log = request_log

    async def run(self, jobs: list[Job], accepted: asyncio.Event | None = None) -> AsyncGenerator[Delta, None]:
        """The text of all answers as it comes. Raises ApiError. The first item waits until every request was taken
        by a worker, so that what refuses one of them is known before anything is sent; `accepted` is set then."""
        num_waiting = len(jobs)
        meters = {answer.index: job.meter for job in jobs for answer in job.answers}
        held: list[Delta] = []
        async with aclosing(merged([self._run_one(job) for job in jobs])) as items:
            async for item in items:
                if isinstance(item, AnswerAccepted):
                    num_waiting -= 1
                    if num_waiting == 0 and accepted is not None:
                        accepted.set()
                else:
                    held.append(item)
                if num_waiting == 0:
                    for delta in held:
                        meters[delta.index].delivered(delta.index, delta.num_tokens)
                        yield delta
                    held = []

    async def _run_one(self, job: Job) -> AsyncGenerator[AnswerAccepted | Delta, None]:
        outcome = "abort"  # unless something else ends it: the client left
        is_refused = False
        num_open = len(job.answers)
        num_cached_tokens = 0
        passed = deadline_passed(job.timeout_s or 0.0)
        request = job.request
        num_prompt_tokens = len(request.prompt_token_ids)
        journey = self._journeys.begin(request.request_id, job.meter.arrival_s, num_prompt_tokens, job.caller)
        try:
            with self._admission.cutoff(job.deadline_s, passed) as cutoff:
                async with aclosing(follow(self._client, job.request, job.answers)) as items:
                    while (item := await cutoff.guard(anext(items, None))) is not None:
                        if isinstance(item, Delta):
                            num_cached_tokens += item.num_cached_tokens
                            if item.finish_reason is not None:
                                num_open -= 1
                                if num_open == 0:
                                    outcome = item.finish_reason
                        yield item
                        if outcome != "abort":
                            self._end(job, outcome, num_cached_tokens)  # before the worker is told, which may take long
                            journey.end(outcome)
        except RequestRejectedError as error:
            is_refused = True
            job.meter.rejected("refused")
            raise bad_request(error.message, error.param, error.code) from error
        except WorkerOverloadedError as error:
            is_refused = True
            job.meter.rejected("queue_full")
            raise overloaded(error.retry_after_s) from error
        except WorkerUnavailableError as error:
            outcome = "error"
            job.meter.rejected("unavailable")
            logger.warning("request %s: %s", job.request.request_id, error)
            raise unavailable(str(error)) from error
        except WorkerFailedError as error:
            outcome = "error"
            logger.error("request %s: %s", job.request.request_id, error)
            raise ApiError(500, str(error), code="worker_failed") from error
        except ApiError as error:
            outcome = "error"
            job.meter.rejected("deadline" if error is passed else "draining")
            raise
        except Exception:
            outcome = "error"
            raise
        finally:
            self._journeys.end(journey, "refused" if is_refused else outcome)
            if not is_refused:
                self._end(job, outcome, num_cached_tokens)

    def _end(self, job: Job, outcome: str, num_cached_tokens: int) -> None:
        ended = job.meter.finished(outcome, sum(answer.num_tokens for answer in job.answers))
        if ended is not None:
            self._request_log.ended(job.request.request_id, ended, num_cached_tokens)
