"""What a contributor and CI are given calls what is there: make targets, files, pinned tools."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text()


def targets(text: str) -> set[str]:
    """The targets that lines of `make …` name; options and variables are none."""
    lines = re.findall(r"\bmake ((?:-o \w+\s+)?[a-z][a-z-]*(?: +[a-z][a-z-]*)*)(?![\w=])", text)
    return {word for line in lines for word in re.sub(r"-o \w+", "", line).split()}


def steps(path: Path) -> list[dict[str, Any]]:
    """The steps of a workflow's jobs."""
    jobs: dict[str, Any] = yaml.safe_load(path.read_text())["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_calls_make(path: Path) -> None:
    """Each job runs targets of the Makefile; a matrix of targets holds only targets."""
    jobs: dict[str, Any] = yaml.safe_load(path.read_text())["jobs"]
    named = {target for step in steps(path) for target in targets(step.get("run", ""))}
    for job in jobs.values():
        named |= set(job.get("strategy", {}).get("matrix", {}).get("target", []))
        assert any("make " in step.get("run", "") for step in job["steps"])
    assert named
    for target in named:
        assert re.search(rf"^{re.escape(target)}:", MAKEFILE, re.MULTILINE), target


def test_ci_installs_on_each_python() -> None:
    """The sdist and the wheel are installed from their files on 3.11, 3.12 and 3.13."""
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    assert jobs["package"]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]
    installed = {step["run"] for step in jobs["package"]["steps"] if "install dist/" in step.get("run", "")}
    assert {re.findall(r"dist/\*\.(\S+)", run)[0] for run in installed} == {"whl", "tar.gz"}


def test_a_workflow_may_only_read() -> None:
    """No workflow's token writes to the repository."""
    assert all(yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"} for path in WORKFLOWS)


def test_nightly_may_mount() -> None:
    """The filesystems of `make test-nfs` and `make torture` need root, and Debian's packages."""
    (job,) = yaml.safe_load((ROOT / ".github/workflows/nightly.yml").read_text())["jobs"].values()
    assert job["container"] == {"image": "python:3.11-bookworm", "options": "--privileged"}


def test_pre_commit_has_the_pinned_ruff() -> None:
    """The hook's ruff and the one that `make lint` runs format alike."""
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    (ruff,) = [repo["rev"] for repo in hooks if repo["repo"].endswith("ruff-pre-commit")]
    assert f"ruff=={ruff.removeprefix('v')}\n" in (ROOT / "requirements/dev.txt").read_text()
    for repo in hooks:
        for hook in repo["hooks"]:
            for word in hook.get("entry", "").split()[1:]:
                assert (ROOT / word).exists(), word


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", ".github/pull_request_template.md", "docs/release.md"])
def test_a_page_names_targets_that_exist(page: str) -> None:
    """Each `make TARGET` in code is a target."""
    code = re.findall(r"`(make [^`]*)`|^\$ (make .*)$", (ROOT / page).read_text(), re.MULTILINE)
    named = {target for pair in code for line in pair for target in targets(line.partition("#")[0])}
    assert named
    for target in named:
        assert re.search(rf"^{re.escape(target)}:", MAKEFILE, re.MULTILINE), target


def test_contributing_names_files_that_exist() -> None:
    """Every path in backticks is one."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    paths = re.findall(
        r"`((?:sidecar|kernels|worker_patch|tests|benchmarks|requirements|\.ci)/[\w/.-]+)`", text
    )
    assert len(paths) > 8
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("name", ["bug.yml", "feature.yml"])
def test_an_issue_form_has_its_parts(name: str) -> None:
    """A form needs a name, a description, and ids of its own."""
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE" / name).read_text())
    assert {"name", "description", "body"} <= form.keys()
    ids = [part["id"] for part in form["body"]]
    assert len(ids) == len(set(ids))
