"""Makes the engine of this process a target. Importing this loads torch."""

from collections.abc import Callable
from pathlib import Path

from deployments.bench.engine_target import EngineTarget
from deployments.bench.prompts import PromptMaker
from deployments.cli.options import UsageError, usage_error
from worker.config import ConfigError, EngineConfig
from worker.demo_model import DemoModelError
from worker.engine import Engine
from worker.engine_loop import EngineLoop
from worker.model_support import UnsupportedModelError
from worker.weights import WeightsError


def load_engine_target(config: EngineConfig, prompts_for: Callable[[int], PromptMaker]) -> EngineTarget:
    """Loads the model. `prompts_for` is asked with its vocabulary's size. Raises UsageError for what cannot run."""
    try:
        engine = Engine(config)
    except ConfigError as error:
        raise usage_error(error) from error
    except (WeightsError, UnsupportedModelError, DemoModelError) as error:
        raise UsageError("--model", str(error)) from error
    name = f"{Path(config.model).name} ({config.scheduler_policy})"
    target = EngineTarget(name, prompts_for(engine.vocab_size))
    # A loop that dies ends every request with an error and logs why: there is nobody else to tell.
    target.attach(EngineLoop(engine, target.deliver, on_death=lambda error: None))
    return target
