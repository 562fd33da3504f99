"""What the tests of an operator's day stand on: engines with and without our plugin.

Every engine is a real vLLM, forked from one pre-imported process. The hub that they know
takes connections and never answers.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import lora_fs.demo.engine
from lora_fs.demo.engine import ENGINE_ENV, EngineFarm
from lora_fs.demo.process import module_command
from lora_fs.demo.tiny_llama import MODEL_NAME
from tests.engine.client import owned
from tests.gateway.forks import commands_are_forked

HERE = Path(__file__).parent
ADAPTERS = 16

Adapters = Callable[[int], Path]


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
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="session")
def silent_hub() -> Iterator[socket.socket]:
    """A listener that nobody reads from: ``accept`` tells that somebody asked."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)
        yield listener


@pytest.fixture(scope="session")
def farm(work_dir: Path, silent_hub: socket.socket) -> Iterator[EngineFarm]:
    """Forks engines whose hub is the silent one."""
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here")
    host, port = silent_hub.getsockname()
    # Read once, when the process that all engines are forked from imports huggingface_hub and triton.
    read_once = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": f"http://{host}:{port}", "TRITON_INTERPRET": "1"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lora_fs.demo.engine, "ENGINE_ENV", {**ENGINE_ENV, **read_once})
        patch.setattr(lora_fs.demo.engine, "_ZYGOTE", HERE / "zygote.py")
        farm = EngineFarm(work_dir / "engines")
    with farm:
        yield farm


@pytest.fixture(scope="session")
def model_dir(work_dir: Path, farm: EngineFarm) -> Path:
    """The tiny base model, served as ``tiny``; made while the farm is importing."""
    command = module_command("lora_fs.demo.tiny_llama", str(work_dir), "--adapters", str(ADAPTERS))
    subprocess.run(command, check=True, capture_output=True)
    farm.wait_imported()
    return work_dir / MODEL_NAME


@pytest.fixture(scope="session")
def adapters(model_dir: Path) -> Adapters:
    """``adapters(seed)``: a PEFT adapter's folder; no two seeds answer alike."""
    return lambda seed: model_dir.parent / "adapters" / f"a{seed}"


@pytest.fixture(scope="session")
def right(farm: EngineFarm, model_dir: Path, adapters: Adapters) -> Callable[[int], str]:
    """``right(seed)``: what an adapter answers on a stock engine that nothing else happened to."""
    with owned(farm.start("right", model_dir)) as client:
        for seed in range(ADAPTERS):
            assert client.load(f"a{seed}", adapters(seed)).status == 200
        answers = [client.complete(f"a{seed}").text for seed in range(ADAPTERS)]
    assert len(set(answers)) == ADAPTERS
    return answers.__getitem__


@pytest.fixture(scope="session")
def replace(adapters: Adapters) -> Callable[[Path, int], Path]:
    """``replace(folder, seed)``: another adapter's files in a folder that may be there."""

    def run(folder: Path, seed: int) -> Path:
        shutil.rmtree(folder, ignore_errors=True)
        return shutil.copytree(adapters(seed), folder)

    return run
