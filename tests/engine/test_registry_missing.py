"""A vLLM with the plugin whose root holds no registry: its volume is not mounted, or nobody made one yet."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from lora_fs.demo.engine import PLUGIN_ENV, EngineFarm
from lora_fs.demo.tiny_llama import MODEL_NAME
from lora_fs.demo.volume import Volume
from lora_fs.demo.waiting import wait_until
from tests.engine.client import Answer, Client, owned
from tests.engine.plugin import FOLLOWED_S, check_refused


def get(client: Client, path: str) -> Answer:
    return client.post(path, {}, method="GET")


def test_it_waits_for_a_registry(
    farm: EngineFarm,
    model_dir: Path,
    adapters: Callable[[int], Path],
    right: Callable[[int], str],
    tmp_path: Path,
) -> None:
    """It is up and not ready, serves the base model, and writes nothing; after ``lora-fs init`` it serves
    adapters, and was not started again."""
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    root.mkdir()
    elsewhere.mkdir()
    volume = Volume(root, MODEL_NAME, cwd=elsewhere)
    env = {
        **PLUGIN_ENV,
        **volume.env,
        "LORA_FS_STAGE_DIR": str(tmp_path / "stage"),
        "LORA_FS_ALLOWED_SOURCES": str(adapters(0)),
    }
    with owned(farm.start("registry-missing", model_dir, env=env)) as client:
        wait_until(
            "the condition", lambda: "RegistryMissing" in get(client, "/readyz").body, timeout_s=FOLLOWED_S
        )
        readyz = get(client, "/readyz")
        assert (readyz.status, json.loads(readyz.body)["ready"]) == (503, False)
        assert f"lora-fs init --root {root}" in readyz.body
        check_refused(client.complete("a"), 503, "RegistryMissing")
        check_refused(client.load("a", adapters(0)), 503, "holds no registry")
        check_refused(get(client, "/v1/lora_adapters"), 503, "RegistryMissing")
        assert client.complete(MODEL_NAME).status == 200
        assert list(root.iterdir()) == []
        volume.run("init")
        wait_until("it is ready", lambda: get(client, "/readyz").status == 200, timeout_s=FOLLOWED_S)
        volume.run("register", "a", str(adapters(0)), "--wait", "20")
        assert client.complete("a").text == right(0)
