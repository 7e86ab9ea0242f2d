"""`/metrics` as Prometheus reads it: samples by name and labels, and how much they grew between two scrapes."""

import time
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.server_process import ServerProcess, wait_until

IDLE_TIMEOUT_S = 30.0
#: workers report about once a second, and when they turn idle
_REPORT_PERIOD_S = 1.2
_GAUGES = (
    "stallfree_num_requests_waiting",
    "stallfree_num_requests_running",
    "stallfree_num_requests_swapped",
    "stallfree_kv_blocks_used",
)


class Scrape:
    """All samples of one answer; two are equal if every sample is."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float:
        """The sum of the samples of this name with (at least) these labels, of which there must be one."""
        found = [value for (own_name, own), value in self.samples.items() if own_name == name and own >= labels.items()]
        assert found, f"no sample {name} {labels}"
        return sum(found)

    @property
    def reported(self) -> dict[Any, float]:
        """What stands still once everything has been reported: all but the demand, a mean that fades for a minute."""
        return {key: value for key, value in self.samples.items() if key[0] != "stallfree_scaling_demand"}

    @property
    def held(self) -> list[float]:
        """What requests hold: waiting, running, swapped, blocks of both pools."""
        return [self.value(name) for name in _GAUGES]

    @property
    def is_idle(self) -> bool:
        return not any(self.held)


def scrape(server: ServerProcess, *, of_scrape_port: bool = False) -> Scrape:
    response = httpx.get(f"{server.scrape_url if of_scrape_port else server.url}/metrics", timeout=10)
    assert response.status_code == 200
    return Scrape(response.text)


def settled(server: ServerProcess) -> Scrape:
    """When nothing runs and everything has been reported."""
    seen: list[Scrape] = [scrape(server)]

    def is_settled() -> bool:
        time.sleep(_REPORT_PERIOD_S)
        seen.append(scrape(server))
        return seen[-1].is_idle and seen[-1].reported == seen[-2].reported

    try:
        wait_until(is_settled, IDLE_TIMEOUT_S)
    except AssertionError as error:
        changing = {key for key, value in seen[-1].reported.items() if seen[-2].reported.get(key) != value}
        raise AssertionError(f"held: {seen[-1].held}; still changing: {changing}") from error
    return seen[-1]


class Growth:
    """How much samples grew from one scrape to a later one."""

    def __init__(self, before: Scrape, after: Scrape) -> None:
        self._before, self._after = before, after

    def __call__(self, name: str, **labels: str) -> float:
        return self._after.value(name, **labels) - self._before.value(name, **labels)
