"""The image: pinned, not root, with what KubeRay's probes call, without secrets; and the linter's word."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.k8s.manifests import K8S, ROOT

HADOLINT = Path(sys.executable).with_name("hadolint")
DOCKERFILE = (ROOT / "Dockerfile").read_text()
PACKAGES = ("kv_cache", "scheduler", "worker", "monitoring", "deployments")


def instructions(text: str) -> list[tuple[str, str]]:
    """Name and rest of each, without comments, on one line."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def final_stage(text: str) -> list[tuple[str, str]]:
    found = instructions(text)
    return found[max(position for position, (name, _) in enumerate(found) if name == "FROM") :]


def findings(text: str) -> list[str]:
    """What this project asks of its image, beyond the linter."""
    found = [
        f"the base {rest} has no whole version"
        for name, rest in instructions(text)
        if name == "FROM" and not re.match(r"\w+:\d+\.\d+\.\d+\S*( AS \w+)?$", rest)
    ]
    users = [rest for name, rest in final_stage(text) if name == "USER"]
    if not users or not re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1]):
        found.append("the last user is not a number other than root's")
    installed = " ".join(rest for name, rest in final_stage(text) if name == "RUN").split()
    found += [f"{program} is not installed" for program in ("bash", "wget", "g++") if program not in installed]
    secret = re.compile(r"(TOKEN|PASSWORD|SECRET|API_KEY|CREDENTIAL)", re.IGNORECASE)
    found += [f"{name} {rest} names a secret" for name, rest in instructions(text) if secret.search(rest)]
    copied = [rest for name, rest in instructions(text) if name in ("COPY", "ADD")]
    found += [f"copies everything: {rest}" for rest in copied if rest.split()[0] in (".", "./", "*")]
    if any(name == "ENTRYPOINT" for name, _ in final_stage(text)):
        found.append("an entry point stands before KubeRay's command")
    return found


def test_the_image_is_as_this_project_wants_it() -> None:
    assert findings(DOCKERFILE) == []


@pytest.mark.parametrize(
    ("old", "new", "finding"),
    [
        ("python:3.11.14-slim-trixie", "python:latest", "no whole version"),
        ("USER 1000:1000", "USER root", "the last user"),
        ("USER 1000:1000\n", "", "the last user"),
        ("bash g++ wget", "bash g++", "wget is not installed"),
        ("ARG VARIANT=cuda", "ARG HF_TOKEN", "names a secret"),
        ("COPY kv_cache kv_cache", "COPY . .", "copies everything"),
        ("CMD [", "ENTRYPOINT [", "an entry point"),
    ],
)
def test_a_planted_error_in_the_dockerfile_is_found(old: str, new: str, finding: str) -> None:
    assert old in DOCKERFILE
    assert any(finding in text for text in findings(DOCKERFILE.replace(old, new)))


def test_the_builder_sees_what_is_copied_and_nothing_else() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    copied = {
        source
        for name, rest in instructions(DOCKERFILE)
        if name == "COPY" and not rest.startswith("--from")
        for source in rest.split()[:-1]
    }
    seen = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    assert {"k8s/image" if source == "k8s/image/install.sh" else source for source in copied} == seen
    assert {*PACKAGES, "pyproject.toml", "constraints.txt", "README.md"} <= copied


def test_the_install_script_is_a_shell_script_and_refuses_another_variant(tmp_path: Path) -> None:
    ended = subprocess.run(
        [str(K8S / "image" / "install.sh"), str(tmp_path / "env"), "tpu"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert "only cpu and cuda" in ended.stderr
    assert not (tmp_path / "env").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("", "", None),
        ("python:3.11.14-slim-trixie", "python", "DL3006"),
        ("USER 1000:1000", "USER root", "DL3002"),
        ("# hadolint ignore=DL3008\n", "", "DL3008"),
        ("WORKDIR /var/lib/stallfree", "RUN cd /var/lib/stallfree", "DL3003"),
    ],
)
def test_the_linter_finds_nothing_but_what_is_planted(old: str, new: str, rule: str | None, tmp_path: Path) -> None:
    if not HADOLINT.exists():
        pytest.skip("hadolint is not in the environment: pip install -e '.[kubernetes]'")
    shutil.copy(ROOT / "Dockerfile", tmp_path)
    (tmp_path / "Dockerfile").write_text(DOCKERFILE.replace(old, new))
    ended = subprocess.run(
        [str(HADOLINT), str(tmp_path / "Dockerfile")], capture_output=True, text=True, timeout=60, check=False
    )
    found = set(re.findall(r"(?:DL|SC)\d+", ended.stdout))
    assert (found, ended.returncode) == (set(), 0) if rule is None else rule in found
