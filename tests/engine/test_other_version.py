"""A vLLM of a version that the plugin was not tested on, or a fork of one that does otherwise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lora_fs.demo.engine import EngineFarm
from lora_fs.demo.tiny_llama import MODEL_NAME
from lora_fs.demo.volume import Volume
from tests.engine.client import owned
from tests.engine.plugin import BYSTANDER, plugin_engine


def registered(folder: Path, adapter: Path) -> Volume:
    """A registry with one adapter, ``registered``."""
    root, elsewhere = folder / "root", folder / "elsewhere"
    root.mkdir()
    elsewhere.mkdir()
    volume = Volume(root, MODEL_NAME, cwd=elsewhere)
    volume.run("init")
    volume.run("register", "registered", str(adapter))
    return volume


@pytest.mark.parametrize(
    ("engine_is", "why"),
    [
        ({"OTHER_VERSION": "0.29.0"}, "it is version 0.29.0, and the oldest that is served is 0.30"),
        ({"OTHER_VERSION": "dev"}, "its version, 'dev', is none"),
        ({"SHARES_BLOCKS": "1"}, "two revisions of a name share prefix blocks"),
    ],
    ids=["older", "of no version", "a fork of a tested one"],
)
def test_one_that_cannot_be_served_in_does_not_start(
    farm: EngineFarm,
    model_dir: Path,
    tmp_path: Path,
    adapters: Callable[[int], Path],
    engine_is: dict[str, str],
    why: str,
) -> None:
    """It would answer 404 for every adapter, or wrong, and be ready: its last line says what to do."""
    volume = registered(tmp_path, adapters(1))
    engine = farm.start(tmp_path.name, model_dir, env={**volume.env, "VLLM_PLUGINS": "lora_fs", **engine_is})
    assert engine.wait_ended(timeout_s=120), engine.log_tail()
    log = engine.log_text()
    assert "the server does not start: " in log
    assert why in log
    assert "LORA_FS_UNFIT=serve-base" in log
    assert "Loaded endpoint plugin" not in log


def test_an_older_one_that_is_to_serve_its_base_model(
    farm: EngineFarm,
    model_dir: Path,
    tmp_path: Path,
    adapters: Callable[[int], Path],
    right: Callable[[int], str],
) -> None:
    """Its own calls load and unload; that nothing of the registry is there is the last word of the plugin."""
    volume = registered(tmp_path, adapters(1))
    told = {"VLLM_PLUGINS": "lora_fs", "OTHER_VERSION": "0.29.0", "LORA_FS_UNFIT": "serve-base"}
    with owned(farm.start("other-version", model_dir, env={**volume.env, **told})) as client:
        assert client.names() == {MODEL_NAME}
        assert client.load("loaded", adapters(0)).status == 200
        assert client.complete("loaded").text == right(0)
        assert client.complete("registered").status == 404
        assert client.unload("loaded").status == 200
        _, _, after = client.engine.log_text().partition("Loaded endpoint plugin lora_fs")
        assert after.count("lora-fs serves NO ADAPTERS here") == 1


def test_a_newer_one_serves_and_is_told(
    farm: EngineFarm,
    model_dir: Path,
    tmp_path: Path,
    adapters: Callable[[int], Path],
    right: Callable[[int], str],
) -> None:
    """At ``/readyz``, in the metrics, in the status file and in the log; it is ready."""
    with plugin_engine("newer", farm, model_dir, tmp_path, OTHER_VERSION="0.99.0") as plugin:
        plugin.register("sql", adapters(1))
        assert plugin.client.complete("sql").text == right(1)
        assert plugin.client.complete(BYSTANDER).text == right(15)
        told = plugin.client.get_json("/readyz")
        assert told["ready"]
        assert any(one.startswith("VllmUntested: this is vLLM 0.99.0") for one in told["conditions"])
        assert 'lora_fs_conditions{type="VllmUntested"} 1.0' in plugin.client.metrics()
        assert "VllmUntested" in plugin.volume.run("status").stdout
        assert "this is vLLM 0.99.0, and lora-fs was tested on" in plugin.client.engine.log_text()
