"""`write_to_serves_log`: what this project's own loggers say in a replica stands in Serve's log of that replica, under
its own level. Knows no messages.
"""

import logging

#: Serve's own: with it go the replica's log file, its rotation and its format
SERVE_LOGGER = "ray.serve"
#: Serve keeps so many lines back that a warning could be read hours later
_AT_ONCE = logging.WARNING
_PACKAGES = ("deployments", "kv_cache", "monitoring", "scheduler", "worker")


class ServesLog(logging.Handler):
    """Without it warnings would come as lines on stderr, which Serve writes down as INFO, in its own time."""

    def emit(self, record: logging.LogRecord) -> None:
        # Looked up each time: Serve makes its handlers anew when a replica is reconfigured.
        serves = logging.getLogger(SERVE_LOGGER)
        if not serves.isEnabledFor(record.levelno):
            return
        serves.handle(record)
        if record.levelno >= _AT_ONCE:
            for handler in serves.handlers:
                handler.flush()


def write_to_serves_log() -> None:
    """To be called in a replica, before anything is logged."""
    for package in _PACKAGES:
        logger = logging.getLogger(package)
        if not any(isinstance(handler, ServesLog) for handler in logger.handlers):
            logger.addHandler(ServesLog())
