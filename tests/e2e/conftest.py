"""What the end-to-end tests stand on: real vLLM engines, real sidecars, the real command.

Owns the processes and folders; a module gets two fresh replicas on a volume of its own.
Everything is forked from one pre-imported vLLM and dies with the test run. ``ENGINE_PYTHON`` is the
interpreter of another vLLM, stock and known over HTTP alone: what the suite ``sidecar`` of
``.ci/versions.py`` gives.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import pytest

from lora_fs.demo.engine import EngineFarm
from lora_fs.demo.pair import Pair
from lora_fs.demo.process import Process, module_command
from lora_fs.demo.replica import Replica, SidecarReplica
from lora_fs.demo.tiny_llama import MODEL_NAME
from lora_fs.demo.volume import Volume
from tests.gateway.forks import commands_are_forked

HERE = Path(__file__).parent
ADAPTERS = 48


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test of this folder needs an engine: ``-m 'not engine'`` leaves them out."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="module", autouse=True)
def forked() -> Iterator[None]:
    """Commands and sidecars are forked, but those of the demo and of a page: it runs the script."""
    with commands_are_forked():
        yield


@pytest.fixture(scope="session")
def work_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for the session: the model, the adapters, the engines' logs."""
    return tmp_path_factory.mktemp("e2e")


@pytest.fixture(scope="session")
def farm(work_dir: Path) -> Iterator[EngineFarm]:
    """Forks engines."""
    python = os.environ.get("ENGINE_PYTHON")
    if python is None and find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here")
    with EngineFarm(work_dir / "engines", python=python or sys.executable) as farm:
        yield farm


@pytest.fixture(scope="session")
def model_dir(work_dir: Path, farm: EngineFarm) -> Path:
    """The tiny base model, served as ``tiny``; made while the farm is importing."""
    command = module_command("lora_fs.demo.tiny_llama", str(work_dir), "--adapters", str(ADAPTERS))
    subprocess.run(command, check=True, capture_output=True)
    farm.wait_imported()
    return work_dir / MODEL_NAME


@pytest.fixture(scope="session")
def adapters(model_dir: Path) -> Callable[[int], Path]:
    """``adapters(seed)``: a PEFT adapter's folder; no two seeds answer alike."""
    return lambda seed: model_dir.parent / "adapters" / f"a{seed}"


@pytest.fixture(scope="module")
def engine(farm: EngineFarm, model_dir: Path) -> Iterator[Process]:
    """An engine with no sidecar."""
    engine = farm.start("alone", model_dir)
    engine.wait_ready()
    yield engine
    engine.kill()


@pytest.fixture(scope="module")
def engine_args() -> tuple[str, ...]:
    """More vLLM arguments for the replicas; a module overrides it."""
    return ()


@pytest.fixture(scope="module")
def kind() -> type[Replica]:
    """Which replicas; a module that shows both kinds overrides it."""
    return SidecarReplica


@pytest.fixture(scope="module")
def settings() -> dict[str, str]:
    """More of lora-fs's settings for the replicas; a module overrides it."""
    return {"settle_s": "0.5"}


@pytest.fixture(scope="module")
def volume_root(tmp_path_factory: pytest.TempPathFactory, kind: type[Replica]) -> Path:
    """An empty folder for the registry of each kind; a module that mounts something overrides it."""
    return tmp_path_factory.mktemp("volume")


@pytest.fixture(scope="module")
def pair(
    farm: EngineFarm,
    model_dir: Path,
    kind: type[Replica],
    engine_args: tuple[str, ...],
    settings: dict[str, str],
    volume_root: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair[Replica]]:
    """Two ready replicas on an empty volume."""
    volume = Volume(volume_root, MODEL_NAME, cwd=model_dir.parent)
    volume.run("init")
    run_dir = tmp_path_factory.mktemp("replicas")
    with closing(
        Pair(farm, model_dir, volume, run_dir, kind=kind, engine_args=engine_args, settings=settings)
    ) as pair:
        pair.wait_ready()
        yield pair


@pytest.fixture(scope="module")
def register(pair: Pair[Replica]) -> Callable[..., None]:
    """``register(name, folder, *options)``: by the command, until both replicas have seen it."""

    def run(name: str, folder: Path, *options: str) -> None:
        pair.volume.run("register", name, str(folder), "--wait", "20", *options)

    return run
