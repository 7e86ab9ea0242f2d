"""Option files of `stallfree serve`: a Serve config with one application, or plain options by the same names."""

from pathlib import Path
from typing import Any

import yaml

from deployments.cli.options import UsageError

IMPORT_PATH = "deployments.app:build"


def read_options(path: Path) -> dict[str, Any]:
    """The options in the file, by name. Raises `UsageError` for what is not an options file."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("--config", f"cannot read {path}: {error}") from error
    except yaml.YAMLError as error:
        raise UsageError("--config", f"{path} is no YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError("--config", f"{path} must hold options by name, not a {type(content).__name__}")
    options = _from_serve_config(path, content) if "applications" in content else content
    return {str(name).replace("-", "_"): value for name, value in options.items()}


def _from_serve_config(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    applications = content["applications"]
    if not isinstance(applications, list) or len(applications) != 1 or not isinstance(applications[0], dict):
        raise UsageError("--config", f"{path} must hold exactly one application")
    application = applications[0]
    if application.get("import_path") != IMPORT_PATH:
        raise UsageError("--config", f"the import_path in {path} must be {IMPORT_PATH}")
    unusable = (set(content) - {"applications", "http_options"}) | (
        set(application) - {"name", "route_prefix", "import_path", "args"}
    )
    if unusable:
        raise UsageError("--config", f"{path} sets {', '.join(sorted(unusable))}, which `serve deploy` alone takes")
    http_options = content.get("http_options") or {}
    options = application.get("args") or {}
    if not isinstance(options, dict) or not isinstance(http_options, dict) or set(http_options) - {"host", "port"}:
        raise UsageError("--config", f"args and http_options (host, port) of {path} must hold options by name")
    return {**http_options, **options}
