"""What the project's own loggers say in a replica stands in Serve's log."""

import logging
from collections.abc import Iterator
from logging.handlers import MemoryHandler

import pytest

from deployments.replica_log import ServesLog, write_to_serves_log
from tests.api_client import answering
from tests.test_request_log import KeptRecords


@pytest.fixture
def written() -> Iterator[list[logging.LogRecord]]:
    """What Serve's log has written, as Serve buffers it: until there are a thousand lines, or an error."""
    serves, file = logging.getLogger("ray.serve"), KeptRecords()
    buffer = MemoryHandler(1000, flushLevel=logging.ERROR, target=file)
    level = serves.level
    serves.setLevel(logging.INFO)
    serves.addHandler(buffer)
    write_to_serves_log()
    write_to_serves_log()
    yield file.records
    serves.removeHandler(buffer)
    serves.setLevel(level)
    for package in ("deployments", "kv_cache", "monitoring", "scheduler", "worker"):
        logger = logging.getLogger(package)
        for handler in [handler for handler in logger.handlers if isinstance(handler, ServesLog)]:
            logger.removeHandler(handler)


def test_unknown_fields_are_one_warning_that_is_written_at_once(written: list[logging.LogRecord]) -> None:
    logging.getLogger("ray.serve").info("buffered")
    assert not written
    answering("the").complete(flavour="secret", colour=1)
    buffered, line = written
    assert (buffered.getMessage(), line.levelno) == ("buffered", logging.WARNING)
    assert line.getMessage() == "ignored 2 unknown request fields: 'flavour', 'colour'"


def test_a_level_that_serve_does_not_want_is_not_written(written: list[logging.LogRecord]) -> None:
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    answering("the").complete(flavour=1)
    logging.getLogger("worker.engine").error("broken")
    assert [line.getMessage() for line in written] == ["broken"]
