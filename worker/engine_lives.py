"""`EngineLives`: what an engine's requests spent their time on, told with their events. Knows no tokens."""

from collections.abc import Callable, Container

from scheduler import SequenceGroup
from scheduler.life_report import LifeReport
from scheduler.lives import Lives
from scheduler.records import StepRecord
from worker.types import EngineRequest, TokenEvent


class EngineLives:
    """Of one engine, in its thread. `clock` is the engine's."""

    def __init__(self, clock: Callable[[], float], *, is_fair: bool) -> None:
        self._clock = clock
        self._lives = Lives(is_fair=is_fair)

    def arrived(self, request: EngineRequest, group: SequenceGroup, arrival_s: float) -> None:
        self._lives.arrived(
            request.request_id,
            arrival_s,
            len(request.prompt_token_ids),
            taken_in_s=self._clock(),
            tenant=request.tenant,
            priority=group.priority,
            num_rows=len(group.sequences),
            has_grammar=request.params.grammar is not None,
        )

    def settled(self, record: StepRecord) -> None:
        self._lives.settled(record, record.time_s + (record.duration_s or 0.0))

    def tell(self, events: list[TokenEvent], still_open: Container[str]) -> None:
        """Reports go with the last event of a request, and with the first one after it began or resumed to answer,
        so that little is unknown of a request whose worker is lost."""
        answering = self._lives.newly_answering
        for event in events:
            if event.request_id in answering:
                answering.discard(event.request_id)
                event.life = self._lives.report(event.request_id, self._clock())
        ended = {e.request_id: e for e in events if e.finish_reason is not None and e.request_id not in still_open}
        for request_id, last in ended.items():
            life = self._lives.ended(request_id, self._clock())
            if life is not None:
                last.life = life

    def report(self, request_id: str) -> LifeReport | None:
        """As far as it has come; of requests that ended, only of the last ones."""
        return self._lives.report(request_id, self._clock())
