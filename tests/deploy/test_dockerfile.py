"""The Dockerfile, read as text: no Docker engine is needed to see these mistakes."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import pytest

from lora_fs.sidecar import __version__
from tests.cli.conftest import LoraFs
from tests.cli.conftest import lora_fs as lora_fs
from tests.cli.conftest import root as root
from tests.registry.conftest import write_adapter

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


class Instruction(NamedTuple):
    """One instruction of one build stage."""

    stage: int
    word: str
    rest: str


def parse(text: str) -> list[Instruction]:
    """Join continued lines, drop comments, count the stages."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    instructions: list[Instruction] = []
    stage = -1
    for line in filter(str.strip, joined.splitlines()):
        word, _, rest = line.partition(" ")
        stage += word == "FROM"
        instructions.append(Instruction(stage, word, rest.strip()))
    return instructions


DOCKERFILE = parse((ROOT / "Dockerfile").read_text())
LAST_STAGE = DOCKERFILE[-1].stage


def final(word: str) -> list[str]:
    """Every ``word`` instruction of the stage that becomes the image."""
    return [i.rest for i in DOCKERFILE if i.stage == LAST_STAGE and i.word == word]


def copied_from_the_checkout() -> list[str]:
    """Every source that COPY takes from the build context."""
    copies = [i.rest.split() for i in DOCKERFILE if i.word in {"COPY", "ADD"}]
    return [source for words in copies if "--from=" not in words[0] for source in words[:-1]]


def test_two_stages_from_a_supported_python() -> None:
    """Built in one stage, shipped from another, both on a Python that the project allows."""
    base = DOCKERFILE[0]
    assert (base.word, base.rest) == ("ARG", "PYTHON=python:3.11-slim"), (
        "a release says a digest in its place"
    )
    bases = [i.rest for i in DOCKERFILE if i.word == "FROM"]
    assert [base.split()[0] for base in bases] == ["${PYTHON}"] * 2


@pytest.mark.parametrize("source", copied_from_the_checkout())
def test_copied_sources_exist(source: str) -> None:
    """A renamed folder fails here and not at the release."""
    assert (ROOT / source).exists()


def test_every_package_is_copied() -> None:
    """Each folder that the wheel is built from is in the build stage."""
    assert set(PYPROJECT["tool"]["setuptools"]["package-dir"].values()) <= set(copied_from_the_checkout())


@pytest.mark.parametrize("source", copied_from_the_checkout())
def test_dockerignore_lets_the_sources_through(source: str) -> None:
    """The context is an allow list; a source that it hides could not be copied."""
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line.startswith("!")]
    assert any(fnmatch(source, pattern) for pattern in allowed)


def test_runs_as_a_numbered_user_who_is_not_root() -> None:
    """Kubernetes' runAsNonRoot can check a number, not a name."""
    (user,) = final("USER")
    assert user.split(":")[0] == "10001"


def test_nothing_becomes_root_again() -> None:
    """USER comes after every RUN of the final stage and before the command."""
    words = [i.word for i in DOCKERFILE if i.stage == LAST_STAGE]
    assert words.index("USER") > max(n for n, word in enumerate(words) if word == "RUN")
    assert words.index("USER") < words.index("ENTRYPOINT")


def test_installs_no_torch() -> None:
    """No instruction names a framework or an extra that would pull one."""
    for instruction in DOCKERFILE:
        assert not re.search(r"\b(torch|vllm|triton)\b|\.\[", instruction.rest)


def test_the_image_says_what_it_is() -> None:
    """Its labels have the project's version and license, and what it was built from."""
    (labels,) = final("LABEL")
    said = {
        key.rpartition(".")[2]: value for key, value in (one.split("=", 1) for one in shlex.split(labels))
    }
    assert said["version"] == __version__
    assert said["licenses"] == PYPROJECT["project"]["license"]
    assert {said["revision"], said["name"]} == {"${REVISION}", "${PYTHON}"}
    assert {"PYTHON", "REVISION="} <= set(final("ARG")), "what a label names is known in its stage"


def test_any_user_writes_the_stage_folder() -> None:
    """A cluster that chooses the user puts it into group 0."""
    (made,) = (run for run in final("RUN") if "/stage" in run)
    assert "--group=0 --mode=0775 /stage" in made


def test_entrypoint_is_the_installed_command() -> None:
    """The entry point is a script that the wheel installs, and it starts the sidecar."""
    (entrypoint,) = final("ENTRYPOINT")
    (command,) = final("CMD")
    (name,) = json.loads(entrypoint)
    assert name in PYPROJECT["project"]["scripts"]
    assert json.loads(command) == ["sidecar"]


def test_port_is_exposed_and_set() -> None:
    """What is exposed is what the settings say."""
    (port,) = final("EXPOSE")
    assert f"LORA_FS_PORT={port}" in " ".join(final("ENV"))


@pytest.mark.parametrize(
    "setting",
    ["PYTHONSAFEPATH=1", "PYTHONDONTWRITEBYTECODE=1", "HOME=/tmp", "LORA_FS_STAGE_DIR=/stage"],
)
def test_root_may_be_read_only(setting: str) -> None:
    """Nothing is written beside the code or in a home folder."""
    assert setting in " ".join(final("ENV"))


def test_the_example_runs(
    lora_fs: LoraFs, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first lines say to run works as it is said, with a registry in the mounted folder."""
    head = (ROOT / "Dockerfile").read_text().partition("\nFROM ")[0]
    text = re.sub(r"\\\n", " ", "\n".join(line.removeprefix("#") for line in head.splitlines()))
    (example,) = (line for line in text.splitlines() if line.strip().startswith("docker run"))
    words = shlex.split(example)
    arguments = words[words.index("lora-fs") + 1 :]
    assert "/adapters" in arguments
    model = arguments[arguments.index("--model") + 1]
    assert lora_fs("--model", model, "register", "a", str(write_adapter(tmp_path / "a", 1))).code == 0
    monkeypatch.delenv("LORA_FS_ROOT")
    monkeypatch.delenv("LORA_FS_MODEL")
    ran = lora_fs(*(str(root) if word == "/adapters" else word for word in arguments))
    assert ran.code == 0, ran.err
    assert "v1" in ran.out
