"""vLLM's Rust front end, which 0.33 ships behind a flag: a sidecar serves beside it, the plugin refuses it.

``ENGINE_PYTHON`` is the interpreter of a vLLM that has one, as the suite ``rust`` of ``.ci/versions.py``
gives it. Without it these tests do not run: the CPU build of 0.32 has none.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from signal import SIGTERM

import openai
import pytest

from lora_fs.demo.engine import ENGINE_ENV, PLUGIN_ENV, EngineFarm, engine_args
from lora_fs.demo.process import Process, free_port, spawn
from lora_fs.demo.replica import SidecarReplica
from lora_fs.demo.tiny_llama import MODEL_NAME
from lora_fs.demo.volume import Volume
from lora_fs.demo.waiting import wait_until
from tests.engine.client import owned

Adapters = Callable[[int], Path]

NAMES = ("one", "two", "three")
STARTS_S = 300  # it is not forked: it imports vLLM twice
WHERE = "import importlib.util as u; print(u.find_spec('vllm').origin)"

pytestmark = pytest.mark.skipif(
    "ENGINE_PYTHON" not in os.environ,
    reason="vLLM 0.32 has no Rust front end: make test-versions SUITES=rust runs it on 0.33",
)


def serve(model_dir: Path, port: int, log: Path, **env: str) -> Process:
    """``vllm serve`` with the Rust front end."""
    python = os.environ["ENGINE_PYTHON"]
    found = subprocess.run([python, "-P", "-c", WHERE], check=True, capture_output=True, text=True)
    front_end = Path(found.stdout.strip()).with_name("vllm-rs")
    assert os.access(front_end, os.X_OK), front_end
    _, model, *options = engine_args(model_dir, port)
    return spawn(
        "rust",
        [python, "-P", "-m", "vllm.entrypoints.cli.main", "serve", model, *options],
        log=log,
        url=f"http://127.0.0.1:{port}",
        env={
            **ENGINE_ENV,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_USE_RUST_FRONTEND": "1",
            "VLLM_RUST_FRONTEND_PATH": str(front_end),
            **env,
        },
        on_parent_death=SIGTERM,
    )


class RustReplica(SidecarReplica):
    """A sidecar, and a stock engine behind the Rust front end."""

    def start_engine(self) -> None:
        """Not forked: the farm's engines have the Python front end."""
        staged = {"VLLM_RUNTIME_LORA_ALLOWED_PATH_PREFIXES": str(self.stage_dir)}
        self.engine = serve(self._model_dir, self._engine_port, self._dir / "engine.log", **staged)


@pytest.fixture(scope="module")
def right(farm: EngineFarm, model_dir: Path, adapters: Adapters) -> dict[int, str]:
    """What the Python front end answers, by the adapter's seed."""
    with owned(farm.start("right", model_dir)) as client:
        found = {}
        for seed in range(4):
            assert client.load(f"a{seed}", adapters(seed)).status == 200
            found[seed] = client.complete(f"a{seed}").text.strip()
    assert len(set(found.values())) == len(found)
    return found


@pytest.fixture(scope="module")
def volume(model_dir: Path, adapters: Adapters, tmp_path_factory: pytest.TempPathFactory) -> Volume:
    """A registry with three adapters."""
    volume = Volume(tmp_path_factory.mktemp("volume"), MODEL_NAME, cwd=model_dir.parent)
    volume.run("init")
    for seed, name in enumerate(NAMES):
        volume.run("register", name, str(adapters(seed)))
    return volume


@pytest.fixture(scope="module")
def replica(
    farm: EngineFarm, model_dir: Path, volume: Volume, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RustReplica]:
    """Ready."""
    run_dir = tmp_path_factory.mktemp("replica")
    with closing(
        RustReplica("rust", farm, model_dir, volume, run_dir, settings={"settle_s": "0.5"})
    ) as replica:
        replica.wait_ready(timeout_s=STARTS_S)
        yield replica


@pytest.mark.timeout(900)
def test_a_sidecar_serves_beside_it(replica: RustReplica, adapters: Adapters, right: dict[int, str]) -> None:
    """It lists, loads, answers right and unloads, and a name that comes back has its new bytes' answer."""
    assert replica.names() == {MODEL_NAME, *NAMES}
    for seed, name in enumerate(NAMES):
        assert replica.answer(name) == right[seed]
    with pytest.raises(openai.NotFoundError):
        replica.answer("never-registered")
    replica.volume.run("unregister", "one", "--all-revisions")
    wait_until("it is not listed", lambda: "one" not in replica.names(), timeout_s=60)
    wait_until("it is not in the engine", lambda: "one" not in replica.engine_names(), timeout_s=60)
    with pytest.raises(openai.NotFoundError):
        replica.answer("one")
    replica.volume.run("register", "one", str(adapters(3)), "--wait", "60")
    assert replica.answer("one") == right[3]
    assert [replica.answer(name) for name in NAMES[1:]] == [right[1], right[2]]


@pytest.mark.timeout(900)
def test_the_plugin_does_not_start_in_it(model_dir: Path, volume: Volume, tmp_path: Path) -> None:
    """Nothing of the plugin would be asked, and every adapter be 404: the last line says what to do."""
    engine = serve(model_dir, free_port(), tmp_path / "engine.log", **{**PLUGIN_ENV, **volume.env})
    try:
        assert engine.wait_ended(timeout_s=STARTS_S), engine.log_tail()
    finally:
        engine.kill()
    assert "unset VLLM_USE_RUST_FRONTEND, or serve with a sidecar" in engine.log_text()
