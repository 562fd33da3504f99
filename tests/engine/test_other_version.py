"""A vLLM of a version that the plugin was not tested on: it serves as a stock one, and says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lora_fs.demo.engine import EngineFarm
from lora_fs.demo.tiny_llama import MODEL_NAME
from lora_fs.demo.volume import Volume
from tests.engine.client import owned


def test_it_is_left_as_it_is(
    farm: EngineFarm,
    model_dir: Path,
    tmp_path: Path,
    adapters: Callable[[int], Path],
    right: Callable[[int], str],
) -> None:
    """Its own calls load and unload; nothing of the registry is there, and the log says why, once."""
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    root.mkdir()
    elsewhere.mkdir()
    volume = Volume(root, MODEL_NAME, cwd=elsewhere)
    volume.run("init")
    volume.run("register", "registered", str(adapters(1)))
    env = {**volume.env, "VLLM_PLUGINS": "lora_fs", "OTHER_VERSION": "0.29.0"}
    with owned(farm.start("other-version", model_dir, env=env)) as client:
        assert client.names() == {MODEL_NAME}
        assert client.load("loaded", adapters(0)).status == 200
        assert client.complete("loaded").text == right(0)
        assert client.complete("registered").status == 404
        assert client.unload("loaded").status == 200
        log = client.engine.log_text()
        assert log.count("leaves this vLLM as it is: it is version 0.29.0") == 1
