"""`Lives`: folds settled step records into what each request's time was spent on, and who stood in its way.

Everything that a state of a request came to is worked out when the state ends, from sums over steps: a running answer
costs nothing in a step. It reads no clock and changes no decision.
"""

from collections import OrderedDict

from scheduler.blockers import Actor, Blockers, split, within
from scheduler.life import Life, LifeState
from scheduler.life_report import ChunkSpan, LifeReport, LostPlace
from scheduler.records import PreemptionRecord, StepRecord, WaitReason
from scheduler.step_shares import ShareEstimate, StepShares

#: requests that have ended and can still be asked for
MAX_ENDED = 256
RUNNING_STEP = "running_step"
#: reasons that mean that the tokens of a step went to others' prompts
_TAKEN_BY_CHUNKS = frozenset(
    (WaitReason.TOKEN_BUDGET, WaitReason.PARTIAL_PREFILL_CAP, WaitReason.LONG_PREFILL, WaitReason.PREFILLS_FIRST)
)
_WAITING: dict[WaitReason | None, str] = {None: "waiting:", **{reason: f"waiting:{reason}" for reason in WaitReason}}
_SWAPPED: dict[WaitReason | None, str] = {None: "swapped:", **{reason: f"swapped:{reason}" for reason in WaitReason}}
_HELD = (WaitReason.BLOCKS, WaitReason.SEQUENCE_SLOTS)
_HOLDING_KINDS = tuple(kinds[reason] for kinds in (_WAITING, _SWAPPED) for reason in _HELD)
#: what prompts, other answers and one more answer add to running answers' steps; what chunks take of any step
_PROMPTS, _ANSWERS, _ROW, _CHUNKS = "prompts", "answers", "row", "chunks"
_CLOCKS = (*_WAITING.values(), *_SWAPPED.values(), _PROMPTS, _ANSWERS, _ROW)
_OUT = (LifeState.QUEUED, LifeState.THROWN_OUT, LifeState.SWAPPED)


class Lives:
    """Told of arrivals, of each settled step in its order, and of ends. Times are seconds on the caller's clock.

    Invariant: the parts of a request sum exactly to the time since it came.
    """

    def __init__(self, *, is_fair: bool) -> None:
        self._is_fair = is_fair
        self._open: dict[str, Life] = {}
        self._ended: OrderedDict[str, LifeReport] = OrderedDict()
        self._blockers = Blockers(_HOLDING_KINDS)
        self._estimate = ShareEstimate()
        #: microseconds by kind of time, of all steps up to `_now_us`
        self._clocks = dict.fromkeys(_CLOCKS, 0)
        self._now_us = 0
        self._step = 0
        self._num_arrivals = 0
        #: those that began or resumed to answer; who tells of them takes them out
        self.newly_answering: set[str] = set()

    # -- what happens --------------------------------------------------------------------------------------------

    def arrived(
        self,
        request_id: str,
        arrival_s: float,
        num_prompt_tokens: int,
        *,
        taken_in_s: float | None = None,
        tenant: str = "",
        priority: int = 0,
        num_rows: int = 1,
        has_grammar: bool = False,
    ) -> None:
        """`taken_in_s`: when the scheduler got it; None: at once, or when the step that ran had ended."""
        arrival_us = _us(arrival_s)
        taken_in_us = max(self._now_us, arrival_us) if taken_in_s is None else max(_us(taken_in_s), arrival_us)
        if not self._open:
            self._now_us = max(self._now_us, taken_in_us)  # nobody was there: that time is nobody's
        actor = Actor(request_id, tenant, self._num_arrivals, priority, num_prompt_tokens, num_rows)
        self._num_arrivals += 1
        life = self._open[request_id] = Life(actor, arrival_us, taken_in_us, num_rows, num_prompt_tokens)
        held_us = taken_in_us - arrival_us
        if held_us:
            found = self._blockers.chargers(_CHUNKS, self._step - 1, held_us, actor)
            life.add("queue", "grammar" if has_grammar else RUNNING_STEP, held_us, [] if has_grammar else found)
        self._enter(life, LifeState.QUEUED)

    def settled(self, record: StepRecord, end_s: float) -> None:
        """A step has ended at `end_s`, or was planned and is empty. All time since the last one counts as its."""
        begin_us, end_us = self._now_us, max(_us(end_s), self._now_us)
        self._step += 1
        shares = self._estimate.shares(record, end_us - begin_us)
        self._estimate.learn(record)
        for preemption in record.preemptions:
            self._preempted(preemption, begin_us)
        completed = self._ran_chunks(record, shares, begin_us, end_us)
        for request_id in record.resumed:
            life = self._open.get(request_id)
            if life is not None and life.state in _OUT:
                self._close(life, begin_us)
                self._let_in(life)
                self._enter(life, LifeState.DECODE, in_step=True)
        self._advance_clocks(record, shares)
        self._now_us = end_us
        for life in completed:
            self._close(life, end_us)
            self._enter(life, LifeState.DECODE)

    def ended(self, request_id: str, now_s: float) -> LifeReport | None:
        """The whole life of a request that has ended; None for an unknown one."""
        life = self._open.pop(request_id, None)
        if life is None:
            return None
        self._close(life, max(_us(now_s), self._now_us, life.mark_us))
        self._blockers.let_go(life.actor, self._clocks, self._step)
        self.newly_answering.discard(request_id)
        report = self._ended[request_id] = life.report(is_over=True)
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        return report

    def report(self, request_id: str, now_s: float) -> LifeReport | None:
        """As far as it has come, or all of it if it ended lately; None for an unknown one."""
        life = self._open.get(request_id)
        if life is None:
            return self._ended.get(request_id)
        copy = life.copied()
        self._close(copy, max(_us(now_s), self._now_us, copy.mark_us))
        return copy.report(is_over=False)

    # -- steps ---------------------------------------------------------------------------------------------------

    def _preempted(self, preemption: PreemptionRecord, begin_us: int) -> None:
        life = self._open.get(preemption.victim)
        if life is None:
            return
        self._close(life, begin_us)
        self._blockers.let_go(life.actor, self._clocks, self._step)
        beneficiary = self._open.get(preemption.beneficiary)
        life.add_preemption(
            LostPlace(
                life.mark_us - life.arrival_us,
                preemption.mode,
                preemption.reason,
                preemption.beneficiary,
                "" if beneficiary is None else beneficiary.actor.tenant,
                preemption.num_blocks,
                preemption.num_discarded_tokens,
            )
        )
        life.num_discarded_tokens = max(life.num_discarded_tokens, preemption.num_discarded_tokens)
        is_swap = preemption.mode == "swap"
        self._enter(life, LifeState.SWAPPED if is_swap else LifeState.THROWN_OUT, preemption.reason, in_step=True)

    def _ran_chunks(self, record: StepRecord, shares: StepShares, begin_us: int, end_us: int) -> list[Life]:
        """Those whose prompts are complete with this step."""
        completed: list[Life] = []
        for chunk, own_us in zip(record.prefill_chunks, shares.chunk_own_us, strict=True):
            life = self._open.get(chunk.request_id)
            if life is None:
                continue
            taken_us = shares.step_us * (chunk.end - chunk.start) // max(record.num_batched_tokens, 1)
            self._blockers.charge(life.actor, _CHUNKS, taken_us, self._step)
            if life.state in _OUT:
                self._close(life, begin_us)
                self._let_in(life)
                self._enter(life, LifeState.PREFILL, in_step=True)
            if life.num_cached_tokens is None:
                life.num_cached_tokens = chunk.start
            life.actor.num_tokens = max(life.actor.num_tokens, chunk.end)
            span = ChunkSpan(chunk.start, chunk.end, shares.step_us, own_us, record.step_id)
            life.add_chunk(span)
            if life.mark_us < end_us:  # else another of its sequences had a chunk in this step
                if life.mark_us < begin_us:
                    life.add("queue", WaitReason.TOKEN_BUDGET, begin_us - life.mark_us, [])
                    life.mark_us = begin_us
                row_us = end_us - life.mark_us
                own_us = min(own_us, row_us)
                answers_us = min(shares.chunk_answers_us, row_us - own_us)
                if len(record.prefill_chunks) == 1:
                    answers_us = row_us - own_us
                life.add_prefill(span, own_us)
                life.add("interference", "answers", answers_us, [])
                life.add("interference", "prompts", row_us - own_us - answers_us, [])
                life.mark_us = end_us
            if chunk.completes:
                completed.append(life)
        return completed

    def _advance_clocks(self, record: StepRecord, shares: StepShares) -> None:
        clocks = self._clocks
        clocks[_PROMPTS] += shares.decode_prompts_us
        clocks[_ANSWERS] += shares.decode_answers_us
        clocks[_ROW] += min(shares.answer_row_us, shares.step_us)
        if record.num_prefill_tokens and shares.decode_prompts_us:
            for chunk in record.prefill_chunks:
                if (life := self._open.get(chunk.request_id)) is not None:
                    us = shares.decode_prompts_us * (chunk.end - chunk.start) // record.num_prefill_tokens
                    self._blockers.charge(life.actor, _PROMPTS, us, self._step)
        beneficiary = record.preemptions[0].beneficiary if record.preemptions else None
        for kinds, reason, behind in (
            (_WAITING, record.waiting_reason, record.waiting_behind),
            (_SWAPPED, record.swapped_reason, record.swapped_behind),
        ):
            kind = kinds[reason]
            clocks[kind] += shares.step_us
            if reason in _TAKEN_BY_CHUNKS:
                for chunk in record.prefill_chunks:
                    if (life := self._open.get(chunk.request_id)) is not None:
                        us = shares.step_us * (chunk.end - chunk.start) // record.num_batched_tokens
                        self._blockers.charge(life.actor, kind, us, self._step)
            elif reason is WaitReason.PREEMPTION:
                behind = beneficiary
            if reason is not None and behind is not None and (life := self._open.get(behind)) is not None:
                self._blockers.charge(life.actor, kind, shares.step_us, self._step)

    # -- states --------------------------------------------------------------------------------------------------

    def _enter(self, life: Life, state: LifeState, cause: str = "", *, in_step: bool = False) -> None:
        """`in_step`: the state begins with the step that is being settled, not after it."""
        if state is LifeState.DECODE:
            self.newly_answering.add(life.actor.request_id)
        life.enter(state, cause, self._clocks.copy(), self._step - in_step)

    def _let_in(self, life: Life) -> None:
        self._blockers.take_hold(life.actor, self._clocks, self._step)

    def _close(self, life: Life, until_us: int) -> None:
        """Account for the time since the mark, and for who stood in the way since the state began."""
        us = until_us - life.mark_us
        if life.state in _OUT:
            self._close_waiting(life, us)
        elif life.state is LifeState.DECODE:
            self._close_decode(life, us)
        else:
            if us > 0:
                life.add("queue", WaitReason.TOKEN_BUDGET, us, [])
            for name, cause in (("queue", WaitReason.TOKEN_BUDGET), ("interference", "prompts")):
                if part_us := life.us_in_stage(name, cause):
                    life.blame(name, cause, self._blockers.chargers(_CHUNKS, life.step, part_us, life.actor))
        life.mark_us = max(until_us, life.mark_us)

    def _close_decode(self, life: Life, us: int) -> None:
        if us <= 0:
            return
        prompts, answers, row = (self._clocks[kind] - life.clocks[kind] for kind in (_PROMPTS, _ANSWERS, _ROW))
        siblings = min((life.num_rows - 1) * row, answers)
        prompts = min(prompts, us)
        answers = min(answers - siblings, us - prompts)
        life.add("decode", "", us - prompts - answers, [])
        life.add("interference", "answers", answers, [])
        found = self._blockers.chargers(_PROMPTS, life.step, prompts, life.actor)
        life.add("interference", "prompts", prompts, found)

    def _close_waiting(self, life: Life, us: int) -> None:
        if us <= 0:
            return
        kinds = _SWAPPED if life.state is LifeState.SWAPPED else _WAITING
        waited = {reason: self._clocks[kind] - life.clocks[kind] for reason, kind in kinds.items()}
        # It may have come a moment after the last step's end, or have stayed a moment beyond it.
        longest = max(waited, key=waited.__getitem__)
        left_us = us
        for reason, passed_us in sorted(waited.items(), key=lambda item: item[0] is longest):
            if passed_us > 0 or reason is longest:
                part_us = left_us if reason is longest else min(passed_us, left_us)
                left_us -= part_us
                found = within(self._in_the_way(life, kinds[reason], reason, passed_us), part_us)
                self._add_waiting(life, reason, part_us, found)

    def _in_the_way(self, life: Life, kind: str, reason: WaitReason | None, passed_us: int) -> list[tuple[Actor, int]]:
        if reason in _HELD:
            is_slots = reason is WaitReason.SEQUENCE_SLOTS
            return self._blockers.holders(kind, life.clocks[kind], life.step, passed_us, life.actor, is_slots=is_slots)
        return self._blockers.chargers(kind, life.step, passed_us, life.actor)

    def _add_waiting(self, life: Life, reason: WaitReason | None, us: int, found: list[tuple[Actor, int]]) -> None:
        if life.state is not LifeState.QUEUED:
            life.add(life.state.value, life.cause, us, found)
            return
        named = RUNNING_STEP if reason is None else reason.value
        by_cause = split(found, lambda actor: self._passed_by(life.actor, actor) or named)
        own = by_cause.pop(named, [])
        for cause, actors in by_cause.items():
            passed_us = min(sum(actor_us for _, actor_us in actors), us)
            life.add("queue", cause, passed_us, actors)
            us -= passed_us
        life.add("queue", named, us, own)

    def _passed_by(self, waiting: Actor, other: Actor) -> str | None:
        """Why `other`, who came later, was served first."""
        if other.number < waiting.number:
            return None
        if other.priority < waiting.priority:
            return "priority"
        return "fairness" if self._is_fair and other.tenant != waiting.tenant else None


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
