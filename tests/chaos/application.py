"""The application as the servers of these tests deploy it: an engine named by import path, and a note of what each
worker process took in.

`tests.chaos.application:build` is an import path for Serve configs. With `CHAOS_NOTES` naming a folder, each worker
process keeps a file there, named by its process id, with the id of every request that it was given.
"""

import os
from pathlib import Path
from typing import Any

from ray.serve import Application

from deployments.app import ENGINE_BUILDER, build_with_engine
from deployments.config import AppArgs
from deployments.engine_seam import Deliver, Loop, OnDeath, import_builder
from deployments.model_facts import ModelFacts
from worker.config import EngineConfig
from worker.types import EngineRequest

NOTES_VARIABLE = "CHAOS_NOTES"
PACED_ENGINE = "tests.paced_engine:build"


def build(args: dict[str, Any]) -> Application:
    """`args` as `deployments.app:build` takes them, and `engine`: `paced`, or the one that is served."""
    options = dict(args)
    is_paced = options.pop("engine") == "paced"
    return build_with_engine(
        AppArgs.model_validate(options),
        "tests.chaos.application:build_paced" if is_paced else "tests.chaos.application:build_served",
    )


def build_paced(config: EngineConfig, deliver: Deliver, on_death: OnDeath) -> tuple[ModelFacts, Loop]:
    return _noted(PACED_ENGINE, config, deliver, on_death)


def build_served(config: EngineConfig, deliver: Deliver, on_death: OnDeath) -> tuple[ModelFacts, Loop]:
    return _noted(ENGINE_BUILDER, config, deliver, on_death)


def _noted(builder: str, config: EngineConfig, deliver: Deliver, on_death: OnDeath) -> tuple[ModelFacts, Loop]:
    facts, loop = import_builder(builder)(config, deliver, on_death)
    folder = os.environ.get(NOTES_VARIABLE)
    if folder is None:
        return facts, loop
    return facts, NotedLoop(loop, Path(folder) / str(os.getpid()))


class NotedLoop:
    """Everything as the loop does it. A line is in the file before the engine has the request."""

    def __init__(self, loop: Loop, path: Path) -> None:
        self._loop = loop
        self._path = path
        path.touch()

    def submit(self, request: EngineRequest) -> None:
        with self._path.open("a") as file:
            file.write(f"{request.request_id}\n")
        self._loop.submit(request)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)
