"""`ExplanationStore`: the explanations of the newest requests of all ingresses, and questions about running ones.

Bounded in number and bytes; the oldest go first. Knows nothing of what they say, nor who may read them.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from itertools import islice
from typing import TypedDict

MAX_EXPLANATIONS = 8192
MAX_BYTES = 32 * 1024 * 1024
#: requests that share an id that a client chose
MAX_SAME_ALIAS = 64
#: a question that no ingress has answered is dropped, and an ingress that says nothing is gone, after
QUESTION_S = 5.0


class StoredExplanation(TypedDict):
    """`text` is JSON. `aliases` are further ids; the owner is a tenant, or else a key. `ended_s` is on the clock of
    whoever holds it; on its way to somebody else it is the time since then."""

    id: str
    aliases: list[str]
    tenant: str
    key_id: str
    text: str
    ended_s: float


class ExplanationStore:
    """Thread-safe. `clock` gives monotonic seconds."""

    def __init__(
        self,
        clock: Callable[[], float],
        max_explanations: int = MAX_EXPLANATIONS,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._clock = clock
        self._max_explanations = max_explanations
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, StoredExplanation] = OrderedDict()
        self._num_bytes = 0
        self._ids_of_alias: dict[str, list[str]] = {}
        #: when somebody last asked for a request that is not kept, and which ingresses hold requests
        self._questions: dict[str, float] = {}
        self._holders: dict[str, float] = {}
        self._answers: dict[str, tuple[float, list[StoredExplanation]]] = {}

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, source: str, ended: list[StoredExplanation], *, holds_requests: bool) -> list[str]:
        """What has ended at the ingress `source`; returns ids that others ask for, which it may hold."""
        with self._lock:
            now = self._clock()
            for explanation in ended:
                self._drop(explanation["id"])
                self._keep({**explanation, "ended_s": now - explanation["ended_s"]})
            while len(self._kept) > self._max_explanations or self._num_bytes > self._max_bytes:
                self._drop(next(iter(self._kept)))
            self._holders = {name: at for name, at in self._holders.items() if now - at < QUESTION_S}
            if holds_requests:
                self._holders[source] = now
            else:
                self._holders.pop(source, None)
            self._questions = {name: at for name, at in self._questions.items() if now - at < QUESTION_S}
            return list(self._questions)

    def answer(self, request_id: str, running: list[StoredExplanation]) -> None:
        """Of requests under way that somebody asked for."""
        with self._lock:
            now = self._clock()
            self._answers = {name: a for name, a in self._answers.items() if now - a[0] < QUESTION_S}
            self._answers[request_id] = (now, running)
            self._questions.pop(request_id, None)

    def find(self, source: str, request_id: str) -> tuple[list[StoredExplanation], bool]:
        """All with this id or alias; and whether another ingress may hold a request of it: then ask again soon."""
        with self._lock:
            now = self._clock()
            ids = [request_id] if request_id in self._kept else self._ids_of_alias.get(request_id, [])
            found = [self._kept[kept_id] for kept_id in ids]
            asked_s, running = self._answers.get(request_id, (-QUESTION_S, []))
            if found or (running and now - asked_s < QUESTION_S):
                self._answers.pop(request_id, None)
                return found or running, False
            others = any(name != source and now - at < QUESTION_S for name, at in self._holders.items())
            if others:
                self._questions.setdefault(request_id, now)
            return [], others

    def newest(self, count: int, since_s: float = 0.0) -> list[StoredExplanation]:
        """Those that came last, the newest first, of requests that ended at `since_s` or later."""
        with self._lock:
            return [e for e in islice(reversed(self._kept.values()), count) if e["ended_s"] >= since_s]

    def _keep(self, explanation: StoredExplanation) -> None:
        self._kept[explanation["id"]] = explanation
        self._num_bytes += len(explanation["text"])
        for alias in explanation["aliases"]:
            ids = self._ids_of_alias.setdefault(alias, [])
            ids.append(explanation["id"])
            if len(ids) > MAX_SAME_ALIAS:
                del ids[0]

    def _drop(self, request_id: str) -> None:
        explanation = self._kept.pop(request_id, None)
        if explanation is None:
            return
        self._num_bytes -= len(explanation["text"])
        for alias in explanation["aliases"]:
            ids = self._ids_of_alias.get(alias, [])
            if request_id in ids:
                ids.remove(request_id)
            if not ids:
                self._ids_of_alias.pop(alias, None)
