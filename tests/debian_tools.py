"""Programs that come with Debian packages alone. `.ci/run` installs them; elsewhere tests that want one are skipped."""

import shutil

import pytest

_PACKAGES = {
    "chromium": "chromium",
    "node": "nodejs",
    "npm": "npm",
    "prometheus": "prometheus",
    "promtool": "prometheus",
}


def program(name: str) -> str:
    """Its path. Skips the test where it is not installed."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} (Debian package {_PACKAGES[name]}) is not installed")
    return found
