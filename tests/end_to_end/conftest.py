"""One server for all tests of this folder but those that need one of their own."""

from collections.abc import Iterator

import pytest

from tests.end_to_end.configuration import AMPLE_OPTIONS, DEMO_OPTIONS
from tests.server_process import ServerProcess, serving


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(tmp_path_factory.mktemp("server") / "stderr", *DEMO_OPTIONS, *AMPLE_OPTIONS) as running:
        yield running
