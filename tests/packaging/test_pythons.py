"""The wheel in each other Python that this machine has, and what a Python that is too old is told."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import httpx
import pytest

from lora_fs.demo.process import LOCAL, free_port, spawn
from lora_fs.demo.waiting import wait_until
from lora_fs.worker_patch import compat
from tests.packaging.test_install_plugin import plugin as plugin
from tests.packaging.test_wheel import PYPROJECT, ROOT, execute
from tests.packaging.test_wheel import wheel as wheel
from tests.registry.conftest import write_adapter

OLD = "3.10"
LISTED = "/v1/lora_adapters"
# As vLLM's loader: what an entry point raises is told, and the server starts without it.
LOADER = """
from importlib.metadata import entry_points
for group in ("vllm.general_plugins", "vllm.endpoint_plugins"):
    for point in entry_points(group=group, name="lora_fs"):
        try:
            plugin = point.load()
        except Exception as error:
            print("passed over:", error)
            continue
        plugin()
"""


def listed() -> ModuleType:
    """`.ci/pythons.py`, which finds them and makes their environments."""
    spec = importlib.util.spec_from_file_location("ci_pythons", ROOT / ".ci/pythons.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PYTHONS = listed()


@pytest.fixture(scope="module", params=PYTHONS.MINORS)
def installed(request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment of one Python with the wheel and what it requires."""
    minor = request.param
    stands_in = PYTHONS.environment(minor)
    if not stands_in.parents[1].joinpath("made").exists():
        pytest.skip(f"`make pythons` made no environment of Python {minor}, and says why")
    folder = tmp_path_factory.mktemp(f"python{minor}")
    execute(str(stands_in), "-m", "venv", "--without-pip", str(folder), cwd=folder)
    (site,) = folder.glob("lib/python*/site-packages")
    (theirs,) = stands_in.parents[1].glob("lib/python*/site-packages")
    (site / "required.pth").write_text(f"{theirs}\n")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(folder / "bin/python")]
    execute(*pip, "install", "--no-deps", "--no-index", str(wheel), cwd=folder)
    return folder / "bin"


def test_every_module_but_the_engines_imports(installed: Path) -> None:
    """Of the sidecar and the command line, in that Python, and nothing of it is deprecated there.

    Modules of an extra want what it installs, and nothing else.
    """
    program = (
        "import importlib, pkgutil, sys, lora_fs.sidecar as s\n"
        "assert not s.__file__.startswith(sys.argv[1]), s.__file__\n"
        "wants = set()\n"
        "for m in pkgutil.walk_packages(s.__path__, 'lora_fs.sidecar.'):\n"
        "    try:\n"
        "        if not m.name.endswith('__main__'): importlib.import_module(m.name)\n"
        "    except ModuleNotFoundError as error: wants.add((m.name.split('.')[2], error.name))\n"
        "import lora_fs.worker_patch.plugin, lora_fs.schemas\n"
        "print(len(sys.modules) > 500, wants <= {('trust', 'cryptography')}, wants)"
    )
    warn = "error::DeprecationWarning:lora_fs"
    told = execute(str(installed / "python"), "-W", warn, "-c", program, str(ROOT), cwd=installed)
    assert told.startswith("True True "), told


def test_a_volume_is_made_filled_listed_and_served(installed: Path, tmp_path: Path) -> None:
    """By the installed command: help, init, register, list, and a sidecar whose engine is not there."""
    lora_fs, root = str(installed / "lora-fs"), tmp_path / "root"
    volume = [lora_fs, "--root", str(root), "--model", "tiny"]
    assert "Usage" in execute(lora_fs, "--help", cwd=tmp_path)
    execute(*volume, "init", cwd=tmp_path)
    execute(*volume, "register", "sql", str(write_adapter(tmp_path / "adapter")), cwd=tmp_path)
    rows = json.loads(execute(*volume, "list", "-o", "json", cwd=tmp_path))
    assert [row["name"] for row in rows] == ["sql"]
    port = free_port()
    nobody = f"http://127.0.0.1:{free_port()}"
    serve = ["sidecar", "--host", "127.0.0.1", "--port", str(port), "--engine", nobody]
    sidecar = spawn(
        "sidecar",
        [*volume, *serve, "--stage-dir", str(tmp_path / "stage")],
        log=tmp_path / "sidecar.log",
        url=f"http://127.0.0.1:{port}",
        env={"LORA_FS_INSECURE": "1"},
    )
    try:
        sidecar.wait_ready("/health")
        with httpx.Client(**LOCAL, base_url=sidecar.url) as client:
            wait_until("the volume is read", lambda: client.get(LISTED).is_success, timeout_s=60)
            there = client.get(LISTED).json()
            ready = client.get("/readyz")
        assert [one["name"] for one in there["data"]] == ["sql"]
        assert ready.status_code == 503  # its engine is nowhere
    finally:
        sidecar.stop()


def test_the_plugins_folder_has_a_command_in_each(installed: Path, plugin: Path) -> None:
    """What one Python's `install-plugin` wrote runs in another: there is no compiled code in it."""
    assert "Usage" in execute(str(installed / "python"), str(plugin / "bin/lora-fs"), "--help", cwd=installed)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_registrys_suite(installed: Path, tmp_path: Path) -> None:
    """All of tests/registry, in that Python."""
    options = ["--quiet", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "suite")]
    addopts = ["-o", "addopts=--import-mode=importlib", "-m", "not long"]
    execute(str(installed / "python"), "-P", "-m", "pytest", *options, *addopts, "tests/registry", cwd=ROOT)


# -- a Python that is too old --------------------------------------------------------------------


@pytest.fixture(scope="module")
def old() -> str:
    """The Python before the oldest that is served."""
    path = PYTHONS.found(OLD)
    if path is None:
        pytest.skip(f"there is no Python {OLD} on PATH or in pyenv")
    return str(path)


def test_the_oldest_is_said_once(plugin: Path) -> None:
    """The package's metadata, the plugin and the command in its folder say the same."""
    oldest = ".".join(map(str, compat.PYTHON))
    assert PYPROJECT["project"]["requires-python"] == f">={oldest}"
    assert f"sys.version_info < {compat.PYTHON}" in (plugin / "bin/lora-fs").read_text()
    assert int(OLD.partition(".")[2]) + 1 == compat.PYTHON[1]


def test_a_vllm_in_an_old_python_does_not_start(old: str, plugin: Path) -> None:
    """vLLM logs what it cannot import, and would serve without its adapters: this ends the process."""
    answer = subprocess.run(
        [old, "-c", LOADER],
        cwd=plugin.parent,
        env={"PYTHONPATH": str(plugin), "VLLM_PLUGINS": "lora_fs", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 1
    assert answer.stdout == ""
    (line,) = answer.stderr.splitlines()
    assert f"the server does not start: its Python is {OLD}." in line
    assert "3.11 is the oldest that is served" in line


def test_an_old_python_is_none_of_an_engines_business_unless_named(old: str, plugin: Path) -> None:
    """`VLLM_PLUGINS` that names others: the folder on the path ends nothing."""
    general = LOADER.replace('"vllm.endpoint_plugins"', "")  # vLLM loads these for whom it names alone
    where = {"PYTHONPATH": str(plugin), "VLLM_PLUGINS": "another", "PYTHONDONTWRITEBYTECODE": "1"}
    answer = subprocess.run(
        [old, "-c", general], cwd=plugin.parent, env=where, capture_output=True, check=True
    )
    assert (answer.stdout, answer.stderr) == (b"", b"")


def test_the_command_says_what_it_needs(old: str, plugin: Path) -> None:
    """In one line, not a traceback."""
    command = [old, str(plugin / "bin/lora-fs"), "--help"]
    answer = subprocess.run(command, cwd=plugin.parent, capture_output=True, text=True, check=False)
    assert answer.returncode == 1
    assert answer.stderr.startswith(f"lora-fs needs Python 3.11 or newer; this one is {OLD}.")
    assert len(answer.stderr.splitlines()) == 1
