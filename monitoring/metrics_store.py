"""Totals of every process, living and dead, under the label sets they report.

Owns who reports, who fell silent and what the dead had counted. Knows neither Ray, HTTP nor the text format.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypedDict
from uuid import uuid4

from monitoring.accumulator import Accumulator, Snapshot
from monitoring.table import METRICS, TENANT

#: A process pushes about once a second; after this long without a push it is taken for dead.
SILENT_AFTER_S = 5.0

#: Dead processes kept apart under one label set; the longest silent beyond it are added into one report.
MAX_DEAD_REPORTS = 8

#: Label sets come from the operator (model names) and from ranks: more than this is a fault, not a fleet.
MAX_LABEL_SETS = 1000

Labels = tuple[tuple[str, str], ...]
ProcessKey = tuple[str, str]

_RETIRED: ProcessKey = ("", "retired")


class Inheritance(TypedDict):
    """What the dead of a label set had counted, as (source, epoch, snapshot). The living keep it for the store:
    after a restart it starts empty and takes from them what no process of its own can push again."""

    store_id: str
    dead: list[tuple[str, str, Snapshot]]


@dataclass(slots=True)
class Report:
    """The newest snapshot of one process. `said_goodbye`: it ended on purpose, so nobody should miss it."""

    snapshot: Snapshot
    last_push_s: float
    said_goodbye: bool = False

    def is_live(self, now: float) -> bool:
        return not self.said_goodbye and now - self.last_push_s <= SILENT_AFTER_S


@dataclass(slots=True)
class SeriesGroup:
    """All processes that reported under one label set: ingress replicas, or the successive (during an update,
    simultaneous) workers of one rank. Each keeps its own report, so none overwrites another's totals, and one
    that was taken for dead and pushes again merely updates its own."""

    reports: dict[ProcessKey, Report] = field(default_factory=dict)
    has_inherited: bool = False

    def retire_surplus(self, now: float) -> None:
        dead = [key for key, report in self.reports.items() if key != _RETIRED and not report.is_live(now)]
        dead.sort(key=lambda key: self.reports[key].last_push_s)
        for key in dead[: max(0, len(dead) - MAX_DEAD_REPORTS)]:
            self._retire(self.reports.pop(key).snapshot)

    def inherit(self, inheritance: Inheritance) -> None:
        self.has_inherited = True
        for source, epoch, snapshot in inheritance["dead"]:
            if (source, epoch) == _RETIRED:
                self._retire(snapshot)
            elif (source, epoch) not in self.reports:
                self.reports[source, epoch] = Report(snapshot, float("-inf"), said_goodbye=True)

    def _retire(self, snapshot: Snapshot) -> None:
        before = self.reports.get(_RETIRED)
        total = snapshot if before is None else add_totals(before.snapshot, snapshot)
        self.reports[_RETIRED] = Report(total, float("-inf"), said_goodbye=True)

    def dead(self, now: float) -> list[tuple[str, str, Snapshot]]:
        return [(*key, report.snapshot) for key, report in self.reports.items() if not report.is_live(now)]

    def live_snapshots(self, now: float) -> list[Snapshot]:
        """The newest last."""
        live = [report for report in self.reports.values() if report.is_live(now)]
        return [report.snapshot for report in sorted(live, key=lambda report: report.last_push_s)]

    def is_up(self, now: float) -> bool | None:
        """None: the newest process left on purpose, and there is nothing to be up or down."""
        newest = max(self.reports.values(), key=lambda report: report.last_push_s)
        return None if newest.said_goodbye else newest.is_live(now)


@dataclass(slots=True)
class Series:
    """What one label set shows: totals of all its processes, gauges of the living, None where none lives; `infos` are
    those of the newest living one."""

    labels: Labels
    totals: Snapshot
    gauges: dict[str, dict[str, float]] | None
    is_up: bool | None
    infos: dict[str, dict[str, str]]


class MetricsStore:
    """Thread-safe: pushes and scrapes arrive on different threads. `clock` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._groups: dict[Labels, SeriesGroup] = {}
        self._store_id = uuid4().hex

    def push(self, source: str, epoch: str, snapshot: Snapshot, inheritance: Inheritance | None = None) -> Inheritance:
        """Store the cumulative totals of the process `epoch` of `source`. Returns what to hand in next time.

        ValueError: the snapshot does not have the shape of this store's metric table (another version's)."""
        check_shape(snapshot)
        labels = tuple(snapshot["labels"].items())
        with self._lock:
            if labels not in self._groups and len(self._groups) >= MAX_LABEL_SETS:
                raise ValueError(f"already {MAX_LABEL_SETS} label sets, {dict(labels)} is refused")
            now = self._clock()
            group = self._groups.setdefault(labels, SeriesGroup())
            group.reports[source, epoch] = Report(snapshot, now)
            if inheritance and inheritance["store_id"] != self._store_id and not group.has_inherited:
                group.inherit(inheritance)
            group.retire_surplus(now)
            return {"store_id": self._store_id, "dead": group.dead(now)}

    def drop(self, source: str, epoch: str | None = None) -> None:
        """The source (or one process of it) ends on purpose: its gauges go at once, its counters stay."""
        with self._lock:
            for group in self._groups.values():
                for (report_source, report_epoch), report in group.reports.items():
                    if report_source == source and epoch in (None, report_epoch):
                        report.said_goodbye = True

    def series(self) -> list[Series]:
        with self._lock:
            now = self._clock()
            return [_series(labels, group, now) for labels, group in self._groups.items()]


def _series(labels: Labels, group: SeriesGroup, now: float) -> Series:
    totals = _sum([report.snapshot for report in group.reports.values()])
    live = group.live_snapshots(now)
    infos = live[-1]["infos"] if live else {}
    return Series(labels, totals, _sum(live)["gauges"] if live else None, group.is_up(now), infos)


def _sum(snapshots: list[Snapshot]) -> Snapshot:
    total = snapshots[0]
    for snapshot in snapshots[1:]:
        total = add_totals(total, snapshot)
    return total


def add_totals(one: Snapshot, other: Snapshot) -> Snapshot:
    return {
        "labels": one["labels"],
        "counters": _add(one["counters"], other["counters"]),
        "gauges": _add(one["gauges"], other["gauges"]),
        "infos": other["infos"],
        "histograms": {
            name: {
                "counts": [a + b for a, b in zip(totals["counts"], more["counts"], strict=True)],
                "sum": totals["sum"] + more["sum"],
            }
            for name, totals in one["histograms"].items()
            for more in [other["histograms"][name]]
        },
    }


def _add(one: dict[str, dict[str, float]], other: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Processes of different configurations declare different tenants."""
    return {
        name: {value: series.get(value, 0.0) + other[name].get(value, 0.0) for value in {**series, **other[name]}}
        for name, series in one.items()
    }


def check_shape(snapshot: Snapshot) -> None:
    expected = Accumulator(snapshot["labels"]).snapshot()
    if _shape(snapshot) != _shape(expected):
        raise ValueError("the snapshot does not fit the metric table: is another version running?")


def _shape(snapshot: Snapshot) -> object:
    return (
        {name: _values(name, series) for name, series in snapshot["counters"].items()},
        {name: _values(name, series) for name, series in snapshot["gauges"].items()},
        {name: len(totals["counts"]) for name, totals in snapshot["histograms"].items()},
        {name: _told(name, labels) for name, labels in snapshot["infos"].items()},
    )


def _values(name: str, series: dict[str, float]) -> set[str]:
    """Of the metric's own label, without the tenants that a configuration declares."""
    metric = METRICS.get(name)
    is_declared = metric is not None and metric.label == TENANT
    return set(series).intersection(metric.label_values) if metric is not None and is_declared else set(series)


def _told(name: str, labels: dict[str, str]) -> bool:
    """False: with labels that it cannot have."""
    metric = METRICS.get(name)
    return metric is not None and tuple(labels) in ((), metric.info_labels)
