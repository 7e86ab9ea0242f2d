"""Documents that hold a table between two marks: put there by the benchmark that measured it."""

import argparse
from collections.abc import Callable
from pathlib import Path

from benchmarks.options import existing_file
from deployments.cli.output_files import why_not_writable


def with_table(document: str, new_table: str, begin: str, end: str) -> str:
    """The document with what stands between its two marks replaced. Raises ValueError if it has no such marks."""
    before, found_begin, rest = document.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"there is no place for the table: {begin} and {end}")
    return f"{before}{begin}\n{new_table}\n{end}{after}"


def document_with(begin: str, end: str) -> Callable[[str], Path]:
    """A document that has a place between these marks, and can be written."""

    def parse(text: str) -> Path:
        path = existing_file(text)
        reason = why_not_writable(path)
        if reason is not None:
            raise argparse.ArgumentTypeError(f"cannot write {text}: {reason}")
        try:
            with_table(path.read_text(), "", begin, end)
        except OSError as error:
            raise argparse.ArgumentTypeError(f"cannot read {text}: {error.strerror}") from error
        except ValueError as error:  # no marks, or no text
            raise argparse.ArgumentTypeError(f"{text}: {error}") from error
        return path

    return parse
