"""Writes the dashboards beside this file: `python -m monitoring.grafana.build`."""

import json
from pathlib import Path

from monitoring.grafana.overview import OVERVIEW
from monitoring.grafana.panels import Dashboard
from monitoring.grafana.scheduling import SCHEDULING
from monitoring.grafana.tenants import TENANTS
from monitoring.grafana.workers import WORKERS

DASHBOARDS: tuple[Dashboard, ...] = (OVERVIEW, SCHEDULING, WORKERS, TENANTS)
FOLDER = Path(__file__).parent


def files() -> dict[str, str]:
    """Texts by file name."""
    return {f"{each.uid}.json": json.dumps(each.to_json(), indent=2) + "\n" for each in DASHBOARDS}


def main() -> None:
    for name, text in files().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
