"""Where an engine writes down what its scheduler was asked and decided, if it is to."""

import sys

from scheduler.recording import Recorder
from worker.config import ConfigError


def open_recorder(path: str | None) -> Recorder | None:
    """Says on stderr which file it became. Raises ConfigError where none can be made."""
    if path is None:
        return None
    try:
        recorder = Recorder(path)
    except OSError as error:
        raise ConfigError("record", f"{path}: {error.strerror}") from error
    print(f"recording to {recorder.path}", file=sys.stderr, flush=True)
    return recorder
