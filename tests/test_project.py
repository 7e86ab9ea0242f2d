"""The project's shell: what README, Makefile, constraints and docs promise is there."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from monitoring.table import METRICS

ROOT = Path(__file__).parent.parent
PACKAGES = ("kv_cache", "scheduler", "worker", "monitoring", "deployments")
MAX_FILE_LINES = 400
FIRST_SCREEN_LINES = 25

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def project_files() -> list[Path]:
    """The project's own text files: no environment, no caches, nothing that a build or a tool left."""
    found: list[Path] = []
    for folder, subfolders, names in os.walk(ROOT):
        subfolders[:] = [
            name
            for name in subfolders
            if name not in ("__pycache__", "build", "dist")
            and not name.endswith(".egg-info")
            and (not name.startswith(".") or name == ".ci")
        ]
        found.extend(Path(folder) / name for name in names if not name.endswith((".so", ".pyc", ".png")))
    return found


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def normal_name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match, requirement
    return re.sub(r"[-_.]+", "-", match.group()).lower()


def help_of(*command: str) -> str:
    result = subprocess.run(
        [sys.executable, "-m", "deployments.cli.main", *command, "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_first_screen_of_the_readme_names_the_demo_and_the_tests() -> None:
    first_screen = (ROOT / "README.md").read_text().splitlines()[:FIRST_SCREEN_LINES]
    assert any("make demo" in line for line in first_screen)
    assert any("make test" in line for line in first_screen)


@pytest.mark.parametrize(
    "document", ["README.md", "CHANGELOG.md", *sorted(p.name for p in (ROOT / "docs").glob("*.md"))]
)
def test_every_make_target_that_a_document_names_exists(document: str) -> None:
    path = ROOT / document if (ROOT / document).exists() else ROOT / "docs" / document
    named = set(
        re.findall(r"\bmake ([a-z][a-z-]*)", "\n".join(re.findall(r"`[^`\n]+`|^ {4}.+$", path.read_text(), re.M)))
    )
    assert named <= make_targets()


def test_every_file_that_the_readme_links_to_exists() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text())
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_command_lists_its_commands() -> None:
    text = help_of()
    assert "serve" in text
    assert "generate" in text


def test_every_option_in_the_readmes_table_is_one_of_serve() -> None:
    table = re.findall(r"^\| (`--.*?) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    options = re.findall(r"`(--[a-z-]+)`", " ".join(table))
    assert len(options) > 10
    known = set(re.findall(r"--[a-z-]+", help_of("serve")))
    assert [option for option in options if option not in known] == []


def test_constraints_pin_every_dependency_once_and_without_a_build_suffix() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==([0-9]+!)?[A-Za-z0-9.]+", line) for line in lines)
    pinned = [normal_name(line) for line in lines]
    assert len(pinned) == len(set(pinned))
    needed = {normal_name(name) for name in (*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"])}
    assert needed <= set(pinned)


def test_ci_runs_the_readmes_test_command() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert re.search(r"^make test$", script.read_text(), re.MULTILINE)
    assert re.search(r"^set -euo pipefail$", script.read_text(), re.MULTILINE)


def test_no_file_names_a_folder_of_somebodys_machine() -> None:
    # joined here, so that this file does not hold what it looks for
    machine_path = re.compile(rf"(?<![\w.~/-])/(?:{'|'.join(('home', 'root', 'work', 'Users'))})/\w")
    assert machine_path.search("see /" + "root/thing")
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in project_files()
        for line in path.read_text().splitlines()
        if machine_path.search(line)
    ]
    assert found == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_file_has_grown_past_what_one_concept_needs(package: str) -> None:
    sizes = {
        path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines())
        for path in (ROOT / package).rglob("*")
        if path.suffix in (".py", ".cpp", ".html")
    }
    assert sizes
    assert {path: size for path, size in sizes.items() if size > MAX_FILE_LINES} == {}


def test_the_metrics_page_lists_every_metric_with_its_type_labels_and_meaning() -> None:
    rows = re.findall(
        r"^\| `(stallfree_\w+)` \| (\w+) \| (.+?) \| (.+) \|$", (ROOT / "docs" / "metrics.md").read_text(), re.M
    )
    documented = {name: (kind, re.findall(r"`(\w+)`", labels), meaning) for name, kind, labels, meaning in rows}
    assert documented == {
        metric.name: (
            metric.kind.value,
            [
                *metric.identity,
                *([metric.label, *metric.label_values] if metric.label else []),
                *metric.info_labels,
            ],
            metric.help,
        )
        for metric in METRICS.values()
    }
