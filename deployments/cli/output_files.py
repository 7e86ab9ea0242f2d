"""Files that a long command will write at its end: whether it will be able to is found out before it begins."""

import os
from pathlib import Path

from deployments.cli.options import UsageError


def check_output(option: str, path: Path) -> None:
    """Raises UsageError if no file can be written there. Writes nothing itself."""
    reason = why_not_writable(path)
    if reason is not None:
        raise UsageError(option, f"cannot write {path}: {reason}")


def why_not_writable(path: Path) -> str | None:
    """In words; None where a file can be written, as far as that can be told without writing it."""
    folder = path.parent
    try:
        if path.is_dir():
            return "it is a folder"
        if path.exists():
            return None if os.access(path, os.W_OK) else "no permission"
        if not folder.exists():
            return f"there is no folder {folder}"
        if not folder.is_dir():
            return f"{folder} is no folder"
    except (OSError, ValueError) as error:  # a name that is too long, or holds a null byte
        return str(getattr(error, "strerror", None) or error)
    return None if os.access(folder, os.W_OK | os.X_OK) else f"no permission in {folder}"
