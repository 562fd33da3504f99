"""A vLLM without lora-fs serves from the registry with PYTHONPATH alone, as in the Kubernetes example."""

from __future__ import annotations

import subprocess
from pathlib import Path
from signal import SIGTERM

import pytest

from lora_fs.demo.engine import ENGINE_ENV, PLUGIN_ENV, engine_args
from lora_fs.demo.process import free_port, module_command, spawn
from lora_fs.demo.tiny_llama import MODEL_NAME
from lora_fs.demo.volume import Volume
from tests.engine.client import owned
from tests.packaging.test_install_plugin import engine_python as engine_python
from tests.packaging.test_install_plugin import plugin as plugin

STARTS_S = 900  # nothing is forked: vLLM is imported twice, and another Python's compiled each time

pytestmark = [pytest.mark.engine, pytest.mark.timeout(2 * STARTS_S)]


def test_an_engine_serves_with_the_folder_on_its_path(
    engine_python: Path, plugin: Path, tmp_path: Path
) -> None:
    """It lists and serves what was registered before its start and since."""
    made = module_command("lora_fs.demo.tiny_llama", str(tmp_path), "--adapters", "2")
    subprocess.run(made, check=True, capture_output=True)
    (tmp_path / "root").mkdir()
    volume = Volume(tmp_path / "root", MODEL_NAME, cwd=tmp_path)
    volume.run("init")
    volume.run("register", "before", str(tmp_path / "adapters/a0"))
    port = free_port()
    server = ["-P", "-m", "vllm.entrypoints.openai.api_server", *engine_args(tmp_path / MODEL_NAME, port)]
    env = {
        **ENGINE_ENV,
        **PLUGIN_ENV,
        **volume.env,
        "LORA_FS_STAGE_DIR": str(tmp_path / "stage"),
        "PYTHONPATH": str(plugin),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    log, url = tmp_path / "engine.log", f"http://127.0.0.1:{port}"
    engine = spawn(
        "installed",
        [str(engine_python), *server],
        log=log,
        url=url,
        env=env,
        on_parent_death=SIGTERM,
    )
    with owned(engine, "/readyz", starts_s=STARTS_S) as client:
        volume.run("register", "since", str(tmp_path / "adapters/a1"), "--wait", "20")
        assert client.names() == {MODEL_NAME, "before", "since"}
        texts = {client.complete(name).text for name in (MODEL_NAME, "before", "since")}
        assert len(texts) == 3
