"""A real vLLM with the plugin and no token file: closed, or guarded by vLLM's own key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from lora_fs.demo.engine import EngineFarm
from lora_fs.demo.replica import PROMPT, PluginReplica
from lora_fs.demo.tiny_llama import MODEL_NAME
from lora_fs.demo.volume import Volume

KEY = "vllms-own-4711"


@pytest.fixture(scope="module", params=[(), ("--api-key", KEY)], ids=["closed", "keyed"])
def replica(
    request: pytest.FixtureRequest,
    farm: EngineFarm,
    model_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[PluginReplica]:
    """Started as an operator starts it who sets neither a token file nor --insecure."""
    folder = tmp_path_factory.mktemp("key")
    volume = Volume(folder / "volume", MODEL_NAME, cwd=model_dir.parent)
    volume.run("init")
    settings = {"insecure": "0"}
    with closing(
        PluginReplica(
            "a", farm, model_dir, volume, folder / "run", engine_args=request.param, settings=settings
        )
    ) as replica:
        replica.wait_ready()
        yield replica


def test_who_may_register(
    replica: PluginReplica, adapters: Callable[[int], Path], request: pytest.FixtureRequest
) -> None:
    """Nobody where vLLM has no key; where it has one, who shows it, by SageMaker's calls, too, which vLLM's
    own check leaves out. Models are answered throughout."""
    keyed = request.node.callspec.id == "keyed"
    bearer = {"Authorization": f"Bearer {KEY}"}

    def load(path: str, name: str, headers: dict[str, str]) -> httpx.Response:
        where = str(adapters(24))
        body = {"lora_name": name, "lora_path": where, "name": name, "src": where}
        return replica.http.post(path, json=body, headers=headers)

    for path, name in (("/v1/load_lora_adapter", "one"), ("/adapters", "two")):
        for headers in ({}, {"Authorization": "Bearer x"}):
            answer = load(path, name, headers)
            assert answer.status_code == (401 if keyed else 403), answer.text
        answer = load(path, name, bearer)
        assert answer.status_code == (200 if keyed else 403), answer.text
        if not keyed:
            assert "LORA_FS_TOKEN_FILE" in answer.json()["error"]["message"]
    listed = replica.http.get("/v1/models", headers=bearer).raise_for_status().json()["data"]
    assert {card["id"] for card in listed} == {MODEL_NAME, *(("one", "two") if keyed else ())}
    prompt = {"model": MODEL_NAME, "prompt": PROMPT, "max_tokens": 2}
    assert replica.http.post("/v1/completions", json=prompt, headers=bearer).status_code == 200
